#include "draft_length.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>

namespace ggufspec {
namespace {

// The evidence for each number is in brackets: see ggufspec/drafting/constants.py.
constexpr double kSpread = 0.2;        // p * (1 - p) of a typical observation of the prior [derived]
constexpr double kMinSpread = 0.02;    // least p * (1 - p) of an observation, so that certain tokens count too [judgement]
constexpr double kMaxLogOdds = 30;     // limit of log-odds, so that no probability is 0 or 1 [numerical]
constexpr double kMaxGap = 8;          // logits; larger gaps count as this [judgement]
constexpr size_t kLevels = 40;         // grid of the backward induction [numerical: no fixed length is 1 % better]
constexpr double kLowestLevel = 1e-3;  // probability at its lower end [numerical]
constexpr int kMaxIterations = 4;      // of Dinkelbach's method [numerical]
constexpr double kTolerance = 0.005;   // the iteration ends at this relative change of the rate [numerical]

constexpr double kNever = 2;  // a threshold that no probability reaches

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
    if (found == values.end()) return kNever;
    const size_t k = found - values.begin();
    if (k == 0) return 0;
    const double share = values[k] / (values[k] - values[k - 1]);
    return levels()[k] + share * (levels()[k - 1] - levels()[k]);
}

// The best rule if a second is worth `rate` tokens, with the expected tokens and seconds of a round.
StoppingRule rule_at(double rate, const std::vector<double> & curve, double step, const std::vector<double> & downs,
                     double block_bonus, size_t n_per_step) {
    const size_t n_most = curve.size() - 1;
    const std::vector<double> never(n_most, kNever);
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

AcceptanceModel::AcceptanceModel(double intercept, double slope, double weight, double memory)
    : intercept_(intercept),
      slope_(slope),
      floor_(kSpread * weight),
      keep_(1 - 1 / memory),
      h00_(floor_),
      h01_(floor_),
      h11_(2 * floor_) {}

double AcceptanceModel::probability(double gap) const {
    return 1 / (1 + std::exp(-std::clamp(intercept_ + slope_ * std::min(gap, kMaxGap), -kMaxLogOdds, kMaxLogOdds)));
}

void AcceptanceModel::observe(double gap, double acceptance) {
    const double x = std::min(gap, kMaxGap), p = probability(x), h = std::max(p * (1 - p), kMinSpread);
    h00_ = std::max(keep_ * h00_, floor_) + h;
    h01_ = keep_ * h01_ + h * x;
    h11_ = std::max(keep_ * h11_, floor_) + h * x * x;
    const double determinant = h00_ * h11_ - h01_ * h01_;
    if (!(determinant > 1e-9)) return;
    const double residual = acceptance - p;
    const double rise = std::max(residual * (h00_ * x - h01_) / determinant, -slope_);  // the slope stays at 0 or above
    intercept_ += (residual - h01_ * rise) / h00_;
    slope_ += rise;
}

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

void LengthRule::update(std::vector<double> curve, double step, const std::vector<double> & probabilities, double min_rate,
                        size_t n_per_step) {
    curve_ = std::move(curve);
    n_max_ = std::min(n_max_, curve_.size() - 1);
    rule_ = best_rule(curve_, step, probabilities, rule_.rate, min_rate, block_bonus, n_per_step);
}

double LengthRule::update(const CostModel & costs, size_t n_sharers, const AcceptanceModel * by_target, std::vector<double> gaps,
                          size_t n_levels) {
    const double least = 1 / costs.plain_of_text(n_sharers);
    if (by_target == nullptr) {
        curve_ = costs.per_text(n_sharers);
        const std::vector<double> never(curve_.size() - 1, kNever);
        rule_ = {never, never, 1, curve_[0], std::max(1 / curve_[0], least)};
        return 0;
    }
    std::sort(gaps.begin(), gaps.end());
    std::vector<double> probabilities;
    for (size_t k = 0; k < n_levels; k++) {
        probabilities.push_back(by_target->probability(gaps[(2 * k + 1) * gaps.size() / (2 * n_levels)]));
    }
    update(costs.per_text(n_sharers), costs.step(), probabilities, least, costs.n_per_step());
    return std::accumulate(probabilities.begin(), probabilities.end(), 0.0) / double(probabilities.size());
}

PrefixLength LengthRule::prefix_length(const std::vector<double> & probabilities) const {
    PrefixLength best;
    double reached = 1, expected = 0;
    if (!curve_.empty()) best.gain = 1 - rule_.rate * curve_[0];
    for (size_t n = 1; n <= probabilities.size() && (curve_.empty() || n < curve_.size()); n++) {
        reached *= probabilities[n - 1];
        expected += reached;
        const double gain = curve_.empty() ? expected : 1 + expected - rule_.rate * curve_[n];
        if (gain > best.gain) best = {n, gain, expected};
    }
    return best;
}

size_t LengthRule::n_worth(const std::vector<double> & values, size_t n_drafted) const {
    const size_t n_most = std::min(values.size(), n_max_ - std::min(n_max_, n_drafted));
    if (curve_.empty()) return n_most;
    size_t n_best = 0;
    double best = 0, value = 0;
    for (size_t n = 1; n <= n_most; n++) {
        value += values[n - 1];
        const double gain = value - rule_.rate * (curve_[n_drafted + n] - curve_[n_drafted]);
        if (gain > best) best = gain, n_best = n;
    }
    return n_best;
}

size_t LengthRule::n_of_small_risk(const std::vector<double> & probabilities, double plain, double max_risk, double reading,
                                   double step, size_t n_per_step) const {
    const size_t n_most = curve_.empty() ? 0 : std::min(probabilities.size(), curve_.size() - 1);
    for (size_t n = n_most; n > 0; n--) {
        const size_t n_steps = (n + n_per_step - 1) / n_per_step;
        const double paid = curve_[n] - curve_[0] + reading + double(n_steps) * step;
        double risk = 0, won = 0, reached = 1;
        for (size_t k = 0; k < n; k++) {
            risk += reached * (1 - probabilities[k]) * std::max(paid - double(k) * plain, 0.0);
            reached *= probabilities[k];
            won += reached * plain;
        }
        if (risk <= max_risk * (won - paid) && (n == n_most || paid < won)) return n;
    }
    return 0;
}

void LengthRule::start(size_t n_max) {
    n_max_ = curve_.empty() ? n_max : std::min(n_max, curve_.size() - 1);
    n_drawn_ = n_taken_ = 0;
    least = 0;
    reached_ = 1;
    expected_ = 0;
    gaps_.clear();
    stop_ = Stop::none;
    is_foreseen_ = false;
}

size_t LengthRule::take(const std::vector<double> & probabilities) {
    const size_t n_room = curve_.empty() ? probabilities.size() : curve_.size() - std::min(curve_.size(), n_drawn_ + 1);
    size_t n_best = 0;
    double best = 0, reached = reached_, expected = 0, reached_best = reached_, expected_best = 0;
    for (size_t n = 1; n <= std::min(probabilities.size(), n_room); n++) {
        reached *= probabilities[n - 1];
        expected += reached;
        const double gain = curve_.empty() ? expected : expected - rule_.rate * (curve_[n_drawn_ + n] - curve_[n_drawn_]);
        if (gain > best) best = gain, n_best = n, reached_best = reached, expected_best = expected;
    }
    n_drawn_ += n_best;
    n_taken_ += n_best;
    n_max_ += n_best;
    if (!curve_.empty()) n_max_ = std::min(n_max_, curve_.size() - 1);
    reached_ = reached_best;
    expected_ += expected_best;
    return n_best;
}

size_t LengthRule::n_reachable() const {
    size_t n = n_drawn_;
    while (n < n_max_ && (curve_.empty() || rule_.evaluate_from[n] <= 1)) n++;
    return n;
}

void LengthRule::foresee(const std::vector<double> & gaps) {
    if (curve_.empty()) return;
    is_foreseen_ = true;
    n_foreseen_ = n_drawn_;
    double best = 0, reached = reached_, expected = 0;
    const size_t n_most = std::min(n_drawn_ + gaps.size(), n_max_);
    for (size_t n = n_drawn_; n < n_most; n++) {
        reached *= acceptance.probability(gaps[n - n_drawn_]);
        expected += reached * (1 + block_bonus * double(n));
        const double gain = expected - rule_.rate * (curve_[n + 1] - curve_[n_drawn_]);
        if (gain > best) best = gain, n_foreseen_ = n + 1;
    }
}

bool LengthRule::should_evaluate() {
    if (n_drawn_ >= n_max_) stop_ = Stop::limit;
    else if (!is_foreseen_ && !curve_.empty() && reached_ < rule_.evaluate_from[n_drawn_]) stop_ = Stop::unlikely;
    else return true;
    return false;
}

bool LengthRule::should_draw(double gap) {
    const double reached = reached_ * acceptance.probability(gap);
    gaps_.push_back(gap);
    const bool is_below = n_drawn_ < rule_.draw_from.size() && reached < rule_.draw_from[n_drawn_];
    if (reached < least || (is_foreseen_ ? n_drawn_ >= n_foreseen_ : is_below)) {
        stop_ = Stop::uncertain;
        return false;
    }
    add(reached);
    return true;
}

void LengthRule::draw_declined() { add(reached_ * acceptance.probability(gaps_.back())); }

void LengthRule::add(double reached) {
    reached_ = reached;
    expected_ += reached * (1 + block_bonus * double(n_drawn_));
    n_drawn_++;
}

void LengthRule::observe(const std::vector<double> & acceptances) {
    for (size_t i = 0; i < std::min(acceptances.size(), gaps_.size()); i++) acceptance.observe(gaps_[i], acceptances[i]);
}

}  // namespace ggufspec
