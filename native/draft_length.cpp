#include "draft_length.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace ggufspec {
namespace {

constexpr double kSpread = 0.2;     // what a lesson tells at an even chance, about: p * (1 - p)
constexpr double kLeastTold = 0.02;
constexpr double kCertain = 30;     // log-odds: nothing is ever more certain
constexpr double kSurest = 8;       // a gap beyond that says no more

constexpr size_t kLevels = 40;      // chances that a draft still stands, from kLowest to 1, evenly in their logarithm
constexpr double kLowest = 1e-3;
constexpr double kNever = 2;
constexpr int kTurns = 4;
constexpr double kClose = 0.005;

using Levels = std::vector<double>;  // a value for each level

const Levels & levels() {
    static const Levels made = [] {
        Levels of(kLevels);
        for (size_t k = 0; k < kLevels; k++) of[k] = std::exp(std::log(kLowest) * (1 - double(k) / (kLevels - 1)));
        return of;
    }();
    return made;
}

// Where a chance leads on the grid: so many levels down.
double levels_down(double chance) { return -std::log(std::max(chance, 1e-6)) / -std::log(kLowest) * (kLevels - 1); }

// The value `down` levels below level k.
double below(const Levels & values, size_t k, double down) {
    const double place = std::max(double(k) - down, 0.0);
    const size_t low = std::min(size_t(place), kLevels - 2);
    return values[low] + (place - double(low)) * (values[low + 1] - values[low]);
}

// The level from which rising values are above 0.
double first_positive(const Levels & values) {
    const auto found = std::find_if(values.begin(), values.end(), [](double value) { return value > 0; });
    if (found == values.end()) return kNever;
    const size_t k = found - values.begin();
    if (k == 0) return 0;
    const double share = values[k] / (values[k] - values[k - 1]);
    return levels()[k] + share * (levels()[k - 1] - levels()[k]);
}

// The best rule where a second is worth `rate` tokens, and the rate that it reaches.
Rule rule_at(double rate, const std::vector<double> & curve, double step, const std::vector<double> & downs, double bonus) {
    const size_t n_most = curve.size() - 1;
    Rule rule{Levels(n_most, kNever), Levels(n_most, kNever)};
    Levels value(kLevels, 0), seconds(kLevels, 0);  // tokens - rate * seconds still to be gained, and what that takes
    Levels take(kLevels), look(kLevels), spent(kLevels);
    for (size_t n = n_most; n-- > 0;) {
        const double stair = curve[n + 1] - curve[n];
        const double more = 1 + bonus * double(n);
        for (size_t k = 0; k < kLevels; k++) take[k] = more * levels()[k] + value[k] - rate * stair;
        for (size_t k = 0; k < kLevels; k++) {
            double gained = 0, paid = 0;
            for (double down : downs) {
                const double taken = below(take, k, down);
                if (!(taken > 0)) continue;
                gained += taken;
                paid += below(seconds, k, down) + stair;
            }
            look[k] = gained / double(downs.size()) - rate * step;
            spent[k] = paid / double(downs.size()) + step;
        }
        rule.take_from[n] = first_positive(take);
        rule.look_from[n] = first_positive(look);
        for (size_t k = 0; k < kLevels; k++) {
            value[k] = std::max(look[k], 0.0);
            seconds[k] = look[k] > 0 ? spent[k] : 0;
        }
    }
    rule.tokens = 1 + value.back() + rate * seconds.back();
    rule.seconds = curve[0] + seconds.back();
    return rule;
}

}  // namespace

Chance::Chance(double at_zero, double slope, double weight, double memory)
    : at_zero_(at_zero), slope_(slope), floor_(kSpread * weight), keep_(1 - 1 / memory), h00_(floor_), h01_(floor_), h11_(2 * floor_) {}

double Chance::of(double gap) const {
    return 1 / (1 + std::exp(-std::clamp(at_zero_ + slope_ * std::min(gap, kSurest), -kCertain, kCertain)));
}

void Chance::learn(double gap, double came) {
    const double x = std::min(gap, kSurest), p = of(x), h = std::max(p * (1 - p), kLeastTold);
    h00_ = std::max(keep_ * h00_, floor_) + h;
    h01_ = keep_ * h01_ + h * x;
    h11_ = std::max(keep_ * h11_, floor_) + h * x * x;
    const double determinant = h00_ * h11_ - h01_ * h01_;
    if (!(determinant > 1e-9)) return;
    const double surprise = came - p;
    const double rise = std::max(surprise * (h00_ * x - h01_) / determinant, -slope_);  // surer never means less likely
    at_zero_ += (surprise - h01_ * rise) / h00_;
    slope_ += rise;
}

Rule best_rule(const std::vector<double> & curve, double step, const std::vector<double> & chances, double rate, double worth,
               double bonus) {
    std::vector<double> downs;
    for (double chance : chances) downs.push_back(levels_down(chance));
    const double least = std::max(1 / curve[0], worth);
    rate = std::max(rate, least);
    Rule rule;
    for (int turn = 0; turn < kTurns; turn++) {
        rule = rule_at(rate, curve, step, downs, bonus);
        const double found = std::max(rule.tokens / rule.seconds, least);
        const bool is_close = std::abs(found - rate) < kClose * rate;
        rule.rate = rate = found;
        if (is_close) break;
    }
    return rule;
}

void LengthRule::reckon(std::vector<double> curve, double step, const std::vector<double> & gaps, double worth) {
    std::vector<double> chances;
    for (double gap : gaps) chances.push_back(chance.of(gap));
    curve_ = std::move(curve);
    rule_ = best_rule(curve_, step, chances, rule_.rate, worth, bonus);
}

Weighed LengthRule::weigh(const std::vector<double> & chances) const {
    Weighed best;
    double still = 1, expected = 0;
    if (!curve_.empty()) best.gain = 1 - rule_.rate * curve_[0];
    for (size_t n = 1; n <= chances.size() && (curve_.empty() || n < curve_.size()); n++) {
        still *= chances[n - 1];
        expected += still;
        const double gain = curve_.empty() ? expected : 1 + expected - rule_.rate * curve_[n];
        if (gain > best.gain) best = {n, gain, expected};
    }
    return best;
}

void LengthRule::begin(size_t n_max) {
    n_max_ = n_max;
    n_looked_ = 0;
    still_ = 1;
    expected_ = 0;
    taken_.clear();
    seen_.clear();
    end_ = End::none;
}

bool LengthRule::looks() {
    const size_t n = taken_.size();
    if (n >= n_max_) {
        end_ = End::limit;
    } else if (n < rule_.look_from.size() && still_ < rule_.look_from[n]) {
        end_ = End::unlikely;
    } else {
        n_looked_++;
        return true;
    }
    return false;
}

bool LengthRule::takes(double gap) {
    const size_t n = taken_.size();
    const double still = still_ * chance.of(gap);
    seen_.push_back(gap);
    if (n < rule_.take_from.size() && still < rule_.take_from[n]) {
        end_ = End::unsure;
        return false;
    }
    still_ = still;
    expected_ += still * (1 + bonus * double(n));
    taken_.push_back(gap);
    return true;
}

}  // namespace ggufspec
