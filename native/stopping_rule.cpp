#include "stopping_rule.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace ggufspec {
namespace {

// The evidence for each number is in brackets: see ggufspec/drafting/constants.py.
constexpr size_t kLevels = 40;         // grid of the backward induction [numerical: no fixed length is 1 % better]
constexpr double kLowestLevel = 1e-3;  // probability at its lower end [numerical]
constexpr int kMaxIterations = 4;      // of Dinkelbach's method [numerical]
constexpr double kTolerance = 0.005;   // the iteration ends at this relative change of the rate [numerical]

using Levels = std::array<double, kLevels>;  // a value for each level

// Probabilities that the draft is still accepted, from kLowestLevel to 1, evenly spaced in their logarithm.
const Levels & levels() {
    static const Levels made = [] {
        Levels of{};
        for (size_t k = 0; k < kLevels; k++) of[k] = std::exp(std::log(kLowestLevel) * (1 - double(k) / (kLevels - 1)));
        return of;
    }();
    return made;
}

// The number of levels by which multiplying with a probability lowers a grid position.
double levels_down(double probability) {
    return -std::log(std::max(probability, 1e-6)) / -std::log(kLowestLevel) * (kLevels - 1);
}

// Adds to `gained` and `paid`, for each level k, what is drawn and spent `down` levels below it, where drawing pays.
void add_below(double down, const Levels & drawn, const Levels & spent, Levels & gained, Levels & paid) {
    // Between two levels, the share of the upper one is the same for all k.
    const double whole = std::floor(down), upper = 1 - (down - whole);
    const size_t n_low = std::min(size_t(whole) + 1, kLevels);  // number of levels that have none so far below them
    for (size_t k = 0; drawn[0] > 0 && k < n_low; k++) {
        gained[k] += drawn[0];
        paid[k] += spent[0];
    }
    for (size_t k = n_low; k < kLevels; k++) {
        const size_t low = k - n_low;
        const double value = drawn[low] + upper * (drawn[low + 1] - drawn[low]);
        const double seconds = spent[low] + upper * (spent[low + 1] - spent[low]);
        const double pays = value > 0 ? 1 : 0;  // without a branch, which would prevent vectors
        gained[k] += pays * value;
        paid[k] += pays * seconds;
    }
}

// The probability at which `values`, which increase, become positive.
double first_positive(const Levels & values) {
    const auto found = std::find_if(values.begin(), values.end(), [](double value) { return value > 0; });
    if (found == values.end()) return kNeverReached;
    const size_t k = found - values.begin();
    if (k == 0) return 0;
    const double share = values[k] / (values[k] - values[k - 1]);
    return levels()[k] + share * (levels()[k - 1] - levels()[k]);
}

// The best rule if a second is worth `rate` tokens, with the expected tokens and seconds of a round.
StoppingRule rule_at(double rate, const std::vector<double> & curve, double step, const std::vector<double> & downs,
                     double block_bonus, size_t n_per_step) {
    const size_t n_most = curve.size() - 1;
    const std::vector<double> never(n_most, kNeverReached);
    StoppingRule rule{never, never};
    const Levels reached = levels();
    Levels value{}, seconds{};  // tokens - rate * seconds still to be gained, and those seconds
    Levels draw{}, after{}, evaluate{}, spent{};
    const size_t n_end = n_per_step > 1 ? std::min(n_most, n_per_step) : n_most;  // a draft has only one block
    for (size_t n = n_end; n-- > 0;) {
        const double stair = curve[n + 1] - curve[n];
        const double price = n % n_per_step == 0 ? step : 0;
        const double weight = 1 + block_bonus * double(n);
        for (size_t k = 0; k < kLevels; k++) {
            draw[k] = weight * reached[k] + value[k] - rate * stair;
            after[k] = seconds[k] + stair;
            evaluate[k] = spent[k] = 0;
        }
        for (double down : downs) add_below(down, draw, after, evaluate, spent);
        for (size_t k = 0; k < kLevels; k++) {
            evaluate[k] = evaluate[k] / double(downs.size()) - rate * price;
            spent[k] = spent[k] / double(downs.size()) + price;
        }
        rule.draw_from[n] = first_positive(draw);
        rule.evaluate_from[n] = first_positive(evaluate);
        for (size_t k = 0; k < kLevels; k++) {
            value[k] = std::max(evaluate[k], 0.0);
            seconds[k] = evaluate[k] > 0 ? spent[k] : 0;
        }
    }
    rule.tokens = 1 + value.back() + rate * seconds.back();
    rule.seconds = curve[0] + seconds.back();
    return rule;
}

}  // namespace

StoppingRule best_rule(const std::vector<double> & curve, double step, const std::vector<double> & probabilities, double rate,
                       double min_rate, double block_bonus, size_t n_per_step) {
    std::vector<double> downs;
    for (double probability : probabilities) downs.push_back(levels_down(probability));
    const double least = std::max(1 / curve[0], min_rate);
    rate = std::max(rate, least);
    StoppingRule rule;
    for (int i = 0; i < kMaxIterations; i++) {
        rule = rule_at(rate, curve, step, downs, block_bonus, n_per_step);
        const double found = std::max(rule.tokens / rule.seconds, least);
        const bool is_close = std::abs(found - rate) < kTolerance * rate;
        rule.rate = rate = found;
        if (is_close) break;
    }
    return rule;
}

}  // namespace ggufspec
