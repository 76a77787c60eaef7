#include "cost_model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace ggufspec {

CostModel::CostModel(const Constants & constants, size_t n_most, size_t n_sharers, size_t n_per_step, StartingCosts start)
    : balance(constants.START_BALANCE),
      constants_(constants),
      n_most_(n_most),
      n_sharers_(n_sharers),
      n_per_step_(n_per_step),
      start_(std::move(start)),
      positions_(positions()) {}

void CostModel::use(size_t circumstances, bool is_disturbed) {
    is_disturbed_ = is_disturbed;
    if (circumstances == circumstances_) return;
    of_others_[std::exchange(circumstances_, circumstances)] = known_;
    if (const auto found = of_others_.find(circumstances); found != of_others_.end()) known_ = found->second;
    curve_.clear();
}

void CostModel::observe_target(size_t n_tokens, double seconds) {
    if (ignores() || n_tokens < 1 || n_tokens > n_largest() || !(seconds > 0) || is_compiled_for(n_tokens)) return;
    const auto known = known_.sizes.find(n_tokens);
    const size_t count = n_measured(n_tokens);
    double found = seconds;
    if (known != known_.sizes.end()) {
        found = updated(known->second.seconds, seconds, count);
    } else if (const auto one = known_.sizes.find(1); one != known_.sizes.end()) {
        // A pass over n tokens takes no longer than n single-token passes, unless disturbed.
        found = std::min(seconds, double(n_tokens) * one->second.seconds);
        if (is_measured_before()) found = updated(curve()[n_tokens - 1], found, count);
    }
    known_.n_passes++;
    known_.sizes[n_tokens] = {found, count + 1, known_.n_passes};
    curve_.clear();
}

void CostModel::observe_plain(double seconds) {
    if (ignores() || !(seconds > 0)) return;
    known_.plain = known_.plain > 0 ? updated(known_.plain, seconds, known_.n_plain) : seconds;
    known_.n_plain++;
}

void CostModel::observe_draft(size_t n_steps, double seconds, size_t n_further) {
    if (ignores() || n_steps < 1 || !(seconds > 0) || is_compiled_for(0)) return;
    const double steps = double(n_steps), further = double(n_further);
    if (known_.n_steps == 0) {  // divided between steps and reading in the usual proportion
        const double beside = n_per_step_ == 1 ? usual_read() * further : 0, known = step();
        known_.step = seconds / (steps + beside);
        if (knows_step_before() && !known_.sizes.empty()) known_.step = updated(known, known_.step, 0);
    }
    if (n_per_step_ > 1 && further <= constants_.FEW_BESIDE_BLOCK) {
        known_.step = updated(known_.step, std::max(seconds - further * known_.read, 0.0) / steps, known_.n_steps);
    } else if (n_further > 0) {
        const double found = std::min(std::max(seconds - steps * known_.step, 0.0) / further, known_.step);
        const double rate = 1 - std::pow(1 - constants_.COST_LEARNING_RATE, further);
        known_.read += known_.read > 0 ? (found - known_.read) * rate : found;
    } else {
        known_.step = updated(known_.step, seconds / steps, known_.n_steps);
    }
    known_.n_steps++;
    known_.step_at = known_.n_passes;
}

CostModel CostModel::resized(size_t n_most, size_t n_sharers, size_t n_per_step, StartingCosts start) const {
    CostModel made(constants_, n_most, n_sharers, n_per_step, std::move(start));
    made.warm_ = warm_;
    made.known_ = known_;
    made.known_.sizes.erase(made.known_.sizes.upper_bound(made.n_largest()), made.known_.sizes.end());
    return made;
}

CostModel CostModel::resized_as(const CostModel & other) const {
    return resized(other.n_most_, other.n_sharers_, other.n_per_step_, other.start_);
}

CostModel CostModel::as_measured() const {
    CostModel made(constants_, n_most_, n_sharers_, n_per_step_, {});
    std::map<size_t, double> sizes;
    for (size_t n = 1; n <= curve().size(); n++) sizes[n] = curve()[n - 1];
    made.restore(sizes, known_.plain, step(), read());
    return made;
}

void CostModel::restore(const std::map<size_t, double> & sizes, double plain, double step, double read) {
    known_ = {};
    for (const auto & [n, seconds] : sizes) known_.sizes[n] = {seconds, 2, 0};
    known_.plain = plain, known_.step = step, known_.read = read;
    known_.n_plain = plain > 0 ? 2 : 0, known_.n_steps = step > 0 ? 2 : 0;
    curve_.clear();
}

size_t CostModel::n_measured(size_t n_tokens) const {
    const auto found = known_.sizes.find(n_tokens);
    return found == known_.sizes.end() ? 0 : found->second.n_measured;
}

const std::vector<double> & CostModel::curve() const {
    if (curve_.empty()) curve_ = interpolated();
    return curve_;
}

double CostModel::of_text(size_t n_tokens, size_t n_sharers) const {
    const std::vector<double> & seconds = curve();
    const auto at = [&](size_t n) { return seconds[std::min(n, seconds.size()) - 1]; };
    n_tokens = std::min(n_tokens, n_most_);
    if (n_sharers <= 1) return at(n_tokens);
    const double plain = at(n_sharers), n_texts = double(n_sharers);
    return std::max(at(n_sharers * n_tokens) / n_texts, plain / n_texts + at(n_sharers + n_tokens - 1) - plain);
}

std::vector<double> CostModel::per_text(size_t n_sharers) const {
    std::vector<double> found(std::min(n_most_, curve().size()));
    for (size_t n = 1; n <= found.size(); n++) found[n - 1] = of_text(n, n_sharers);
    return found;
}

double CostModel::plain() const { return known_.plain > 0 ? std::min(known_.plain, curve()[0]) : curve()[0]; }

double CostModel::step() const {
    if (known_.n_steps > 0) return known_.step * discount(known_.n_passes - known_.step_at, known_.n_steps);
    const double infinity = std::numeric_limits<double>::infinity();
    const double share = start_.is_given() ? start_.step / start_.target[0] : infinity;
    return std::min(share, is_measured_before() ? infinity : constants_.UNMEASURED_STEP) * curve()[0];
}

double CostModel::read() const { return known_.read > 0 ? known_.read : usual_read() * step(); }

bool CostModel::draft_cannot_pay() const {
    for (size_t n = 1; n < n_most_; n++) {
        if (drafting(n) + curve()[n] < double(n + 1) * plain()) return false;
    }
    return true;
}

double CostModel::usual_read() const {
    if (start_.is_given() && start_.step > 0) return start_.read / start_.step;
    return constants_.UNMEASURED_READ / double(n_per_step_);
}

std::map<size_t, double> CostModel::sizes() const {
    std::map<size_t, double> found;
    for (const auto & [n, size] : known_.sizes) found[n] = size.seconds;
    return found;
}

bool CostModel::is_compiled_for(size_t n_tokens) {
    return warm_.insert(n_tokens).second && start_.is_given() && !start_.is_measured;
}

// The factor on the seconds of a size measured n_measured times, most recently `age` passes ago. That measurement may have
// been disturbed: discounting it causes another try. A size measured often is discounted more slowly, because each try costs
// a round.
double CostModel::discount(size_t age, size_t n_measured) const {
    const double rate = constants_.DISCOUNT_PER_PASS / std::max(double(n_measured) / constants_.N_FIRST_MEASUREMENTS, 1.0);
    return std::max(1 - rate * std::max(double(age) - constants_.N_FRESH_PASSES, 0.0), constants_.MIN_DISCOUNT);
}

// An exponential moving average; a faster one of the first measurements replaces it, because first passes are often slow.
double CostModel::updated(double old, double seconds, size_t n_measured) const {
    if (seconds < old && double(n_measured) < constants_.N_FIRST_MEASUREMENTS) return seconds;
    return old + (std::min(seconds, constants_.OUTLIER * old) - old) * constants_.COST_LEARNING_RATE;
}

// Without a start a position is the number of tokens; with one, positions rise as its seconds do.
std::vector<double> CostModel::positions() const {
    const std::vector<double> & seconds = start_.target;
    std::vector<double> found{0, 1};
    for (size_t n = 2; n <= n_largest(); n++) {
        if (!start_.is_given()) {
            found.push_back(double(n));
        } else if (n <= seconds.size()) {
            const double more = (seconds[n - 1] / seconds[0] - 1) / constants_.UNMEASURED_SLOPE;
            found.push_back(std::max(std::min(1 + more, double(n)), found.back() + constants_.LEAST_DISTANCE));
        }
    }
    return found;
}

std::vector<double> CostModel::interpolated() const {
    const std::vector<double> & at = positions_;
    std::vector<std::pair<size_t, double>> known;  // (tokens, seconds)
    for (const auto & [n, size] : known_.sizes) {
        if (n < at.size()) known.emplace_back(n, size.seconds * discount(known_.n_passes - size.at, size.n_measured));
    }
    if (known.empty()) known.emplace_back(1, 1);
    const auto [first, first_seconds] = known.front();
    const auto [last, last_seconds] = known.back();
    const double one = first_seconds / (1 + constants_.UNMEASURED_SLOPE * (at[first] - 1));
    double slope = constants_.UNMEASURED_SLOPE * one;
    if (last > 1) slope = std::max((last_seconds - one) / (at[last] - 1), 0.0);
    if (first > 1) known.emplace(known.begin(), 1, one);
    if (last < at.size() - 1) known.emplace_back(at.size() - 1, last_seconds + slope * (at.back() - at[last]));
    std::vector<double> curve;
    for (size_t n = 1, k = 0; n < at.size(); n++) {
        while (k + 1 < known.size() && known[k + 1].first <= n) k++;
        const auto [left, seconds] = known[k];
        if (left == n) {
            curve.push_back(seconds);
        } else {
            const auto [right, further] = known[k + 1];
            curve.push_back((further - seconds) / (at[right] - at[left]) * (at[n] - at[left]) + seconds);
        }
    }
    return curve;
}

}  // namespace ggufspec
