#include "draft_length.h"

#include <algorithm>
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

// The probability that all tokens up to each are accepted, if those before the first are with probability `reached`.
std::vector<double> products(double reached, const std::vector<double> & probabilities) {
    std::vector<double> found;
    for (double probability : probabilities) found.push_back(reached *= probability);
    return found;
}

double sum_of(const std::vector<double> & values, size_t n) { return std::accumulate(values.begin(), values.begin() + n, 0.0); }

}  // namespace

AcceptanceModel::AcceptanceModel(double intercept, double slope, double weight)
    : intercept_(intercept), slope_(slope), h00_(kSpread * weight), h01_(h00_), h11_(2 * h00_) {}

double AcceptanceModel::probability(double gap) const {
    return 1 / (1 + std::exp(-std::clamp(intercept_ + slope_ * std::min(gap, kMaxGap), -kMaxLogOdds, kMaxLogOdds)));
}

void AcceptanceModel::observe(double gap, double acceptance) {
    const double x = std::min(gap, kMaxGap), p = probability(x), h = std::max(p * (1 - p), kMinSpread);
    h00_ += h;
    h01_ += h * x;
    h11_ += h * x * x;
    const double determinant = h00_ * h11_ - h01_ * h01_;
    if (!(determinant > 1e-9)) return;
    const double residual = acceptance - p;
    const double rise = std::max(residual * (h00_ * x - h01_) / determinant, -slope_);  // the slope stays at 0 or above
    intercept_ += (residual - h01_ * rise) / h00_;
    slope_ += rise;
}

LengthPolicy::LengthPolicy(const Constants & constants, std::shared_ptr<CostModel> costs, Coefficients prior, Coefficients known,
                           double block_bonus, bool has_model)
    : block_bonus(block_bonus),
      has_model(has_model),
      constants_(constants),
      costs_(std::move(costs)),
      prior_(prior.first, prior.second, constants.PRIOR_WEIGHT),
      acceptance_(known.first, known.second, constants.PRIOR_WEIGHT),
      latest_(constants.PRIOR_GAPS.begin(), constants.PRIOR_GAPS.end()) {}

bool LengthPolicy::begin_text(size_t n_unread, size_t n_most) {
    n_since_free_ = n_tokens_ = 0;
    n_most_ = n_most;
    if (is_fixed()) return true;
    n_unread_ = n_prompt_unread_ = n_unread;
    update();
    if (rule_.drafts() && pays_for_reading()) n_prompt_unread_ = 0;
    return n_prompt_unread_ == 0;
}

void LengthPolicy::set_n_sharers(size_t n_sharers) {
    if (is_fixed() || costs_->is_frozen || n_sharers == n_sharers_) return;
    n_sharers_ = n_sharers;
    is_current_ = false;
}

Action LengthPolicy::start_round(size_t n_max, size_t n_unread) {
    n_unread_ = n_unread;
    if (n_unread <= n_prompt_unread_) n_prompt_unread_ = 0;
    update();
    start(n_max);
    if (is_fixed()) return n_max > 0 && !has_failed_ ? Action::draft : Action::skip;
    DraftCosts draft{double(n_unread - 1) * costs_->read(), costs_->step(), costs_->n_per_step()};
    if (n_prompt_unread_ > 0) draft.reading = 0;
    size_t n_affordable = n_max;
    if (!(costs_->balance > 0)) n_affordable = n_of_small_risk(std::vector<double>(n_max, mean_acceptance_), draft);
    if (!costs_->knows_draft()) n_affordable = std::min(n_affordable, costs_->n_per_step());
    n_max_ = std::min(n_max_, n_affordable);
    stop_ = reason_to_skip(n_max, n_affordable);
    if (stop_ == Stop::none) return Action::draft;
    return stop_ == Stop::measuring_plain ? Action::plain : Action::skip;
}

PrefixLength LengthPolicy::prefix_length(std::vector<double> probabilities, std::vector<double> forced, bool is_own) {
    const size_t n_forced = forced.size();
    update();
    start(0);
    std::vector<double> all = forced;
    all.insert(all.end(), probabilities.begin(), probabilities.end());
    if (!is_fixed()) {
        if (all.empty() || (n_forced == 0 && should_measure_plain())) return {};
        if (!is_own || !(costs_->balance > 0)) all.resize(std::max(n_of_small_risk(all, {}), n_forced));
    }
    const std::vector<double> values = products(1, all);
    const auto [n_draft, gain] = most_worth(values, 0, n_room());
    PrefixLength found{n_draft, sum_of(values, n_draft)};
    if (n_draft <= n_forced) return found;
    double model_gain = 0;
    if (has_model)
        model_gain = is_fixed() ? double(n_accepted_) / double(n_drafts_) : rule_.gain() - (1 - rule_.rate * curve_[0]);
    const double reached = n_forced > 0 ? values[n_forced - 1] : 1;
    found.beats_model = gain - most_worth(products(1, forced), 0, n_room()).second > reached * model_gain;
    return found;
}

size_t LengthPolicy::take(const std::vector<double> & probabilities) {
    const std::vector<double> values = products(reached_, probabilities);
    const size_t n = most_worth(values, n_drawn_, n_room()).first;
    n_max_ += n;
    if (!is_fixed()) n_max_ = std::min(n_max_, curve_.size() - 1);
    if (n > 0) reached_ = values[n - 1];
    expected_ += sum_of(values, n);
    n_drawn_ += n;
    n_taken_ += n;
    return n;
}

void LengthPolicy::foresee(const std::vector<double> & gaps) {
    if (is_fixed()) return;
    std::vector<double> values;
    for (double gap : gaps) values.push_back(acceptance_.probability(gap));
    values = products(reached_, values);
    for (size_t i = 0; i < values.size(); i++) values[i] *= 1 + block_bonus * double(n_drawn_ + i);
    is_foreseen_ = true;
    n_foreseen_ = n_drawn_ + n_worth(values, n_drawn_);
}

bool LengthPolicy::should_evaluate() {
    if (n_drawn_ >= n_max_) stop_ = Stop::limit;
    else if (!is_foreseen_ && !is_fixed() && reached_ < rule_.evaluate_from[n_drawn_]) stop_ = Stop::unlikely;
    else return true;
    return false;
}

bool LengthPolicy::should_draw(double gap) {
    const double reached = reached_ * acceptance_.probability(gap);
    gaps_.push_back(gap);
    const bool is_below = n_drawn_ < rule_.draw_from.size() && reached < rule_.draw_from[n_drawn_];
    if (reached < least || (is_foreseen_ ? n_drawn_ >= n_foreseen_ : is_below)) {
        stop_ = Stop::uncertain;
        return false;
    }
    add(reached);
    return true;
}

void LengthPolicy::draw_declined() { add(reached_ * acceptance_.probability(gaps_.back())); }

size_t LengthPolicy::n_worth(const std::vector<double> & values, size_t n_drafted) const {
    return most_worth(values, n_drafted, n_max_ - std::min(n_max_, n_drafted)).first;
}

double LengthPolicy::step_price(double n_read) const {
    if (is_fixed() || costs_->n_per_step() > 1) return 0;  // costs are not weighed, or the block has been computed already
    return rule_.rate * (costs_->step() + n_read * costs_->read());
}

void LengthPolicy::observe_growth(double value, size_t n_steps, size_t n_read) {
    grown_ = value;
    const bool is_read = !is_fixed() && costs_->n_per_step() > 1;  // the chain's block has the distributions of branches
    n_grown_steps_ = is_read ? 0 : n_steps;
    n_grown_read_ = is_read ? 0 : n_read;
}

void LengthPolicy::observe_gaps(const std::vector<double> & gaps) {
    for (double gap : gaps) {
        latest_.push_back(gap);
        if (double(latest_.size()) > constants_.N_GAPS) latest_.pop_front();
        // Return to the prior slowly: acceptance may have risen.
        if (stop_ == Stop::no_gain || stop_ == Stop::unread) acceptance_.observe(gap, prior_.probability(gap));
    }
}

void LengthPolicy::observe_verdict(size_t n_accepted, const std::vector<double> & acceptances) {
    n_drafts_++;
    n_accepted_ += n_accepted;
    // Learns from probabilities: they vary less than the number of accepted tokens.
    for (size_t i = 0; i < std::min(acceptances.size(), gaps_.size()); i++) acceptance_.observe(gaps_[i], acceptances[i]);
    n_observed_ += acceptances.size();
    sum_observed_ += sum_of(acceptances, acceptances.size());
}

void LengthPolicy::observe_round(size_t n_tokens, size_t n_drafted, size_t n_sharers, double draft_seconds,
                                 double target_seconds) {
    is_current_ = false;
    if (is_fixed()) return;
    const size_t n_all = n_evaluated() + n_grown_steps_, n_further = n_unread_ - 1 + n_grown_read_;
    if (n_evaluated() > 0 && n_taken_ == 0 && !has_failed_) {
        costs_->observe_draft(costs_->n_steps(n_all), draft_seconds, n_further);
    }
    if (n_sharers == 1) {
        costs_->observe_target(n_drafted + 1, target_seconds);
        if (was_plain_ && n_drafted == 0) costs_->observe_plain(target_seconds);
    }
    double saved = 0;
    if (n_drafted > 0 || n_evaluated() > 0) {
        double seconds = costs_->of_text(n_drafted + 1, n_sharers_) + costs_->drafting(n_all);
        // A prompt is read for the whole text.
        if (n_evaluated() > 0 && n_prompt_unread_ == 0) seconds += double(n_further) * costs_->read();
        saved = double(n_tokens) - seconds / plain();
    }
    const double invested = constants_.INVESTED_SHARE * double(n_tokens);
    costs_->balance = std::min(costs_->balance + saved + invested, constants_.MAX_BALANCE);
    n_since_free_ = n_drafted > 0 && n_evaluated() == 0 ? 0 : n_since_free_ + n_tokens;
    was_plain_ = n_drafted == 0;
    n_tokens_ += n_tokens;
    n_rounds_++;
    n_without_gain_ += (stop_ == Stop::no_gain || stop_ == Stop::no_balance) && n_sharers_ == 1;
}

void LengthPolicy::give_up_model() {
    stop_ = Stop::failed;
    has_failed_ = true;
    has_model = is_current_ = false;
}

size_t LengthPolicy::n_reachable() const {
    size_t n = n_drawn_;
    while (n < n_max_ && (is_fixed() || rule_.evaluate_from[n] <= 1)) n++;
    return n;
}

double LengthPolicy::expected() const { return std::min(expected_, double(n_drawn_)) + grown_; }  // the bonus could exceed it

// Finds the best rule for the round. The latest gaps stand for those of the tokens to come.
void LengthPolicy::update() {
    if (is_current_) return;
    is_current_ = true;
    std::vector<double> probabilities;
    for (double gap : latest_) probabilities.push_back(acceptance_.probability(gap));
    mean_acceptance_ = sum_of(probabilities, probabilities.size()) / double(probabilities.size());
    if (is_fixed()) return;
    curve_ = costs_->per_text(n_sharers_);
    const double least_rate = 1 / plain();
    if (!has_model) {
        const std::vector<double> never(curve_.size() - 1, kNeverReached);
        rule_ = {never, never, 1, curve_[0], std::max(1 / curve_[0], least_rate)};
        return;
    }
    rule_ = best_rule(curve_, costs_->step(), probabilities, rule_.rate, least_rate, block_bonus, costs_->n_per_step());
}

void LengthPolicy::start(size_t n_max) {
    n_max_ = is_fixed() ? n_max : std::min(n_max, curve_.size() - 1);
    n_drawn_ = n_taken_ = n_grown_steps_ = n_grown_read_ = 0;
    least = expected_ = grown_ = 0;
    reached_ = 1;
    gaps_.clear();
    stop_ = has_failed_ ? Stop::failed : Stop::none;
    is_foreseen_ = false;
}

void LengthPolicy::add(double reached) {
    reached_ = reached;
    expected_ += reached * (1 + block_bonus * double(n_drawn_));
    n_drawn_++;
}

size_t LengthPolicy::n_room() const {
    return is_fixed() ? std::numeric_limits<size_t>::max() : curve_.size() - std::min(curve_.size(), n_drawn_ + 1);
}

Stop LengthPolicy::reason_to_skip(size_t n_max, size_t n_affordable) const {
    if (n_max == 0) return Stop::text_ends;
    if (should_measure_plain()) return Stop::measuring_plain;
    if (has_failed_) return Stop::failed;
    if (!rule_.drafts()) return Stop::no_gain;
    if (!pays_for_reading()) return Stop::unread;
    return n_affordable > 0 ? Stop::none : Stop::no_balance;
}

bool LengthPolicy::should_measure_plain() const {
    return !costs_->is_frozen && n_sharers_ <= 1 && double(costs_->n_measured(1)) < constants_.N_PLAIN;
}

// Whether drafting is expected to save more than reading the unread tokens costs. Other texts in the pass wait for it, too.
bool LengthPolicy::pays_for_reading() const {
    const double saved = plain() - 1 / rule_.rate;                         // per token
    const double extra = (double(n_unread_) - 2) * costs_->read();         // two are unread after an accepted draft
    double horizon = std::max(double(n_since_free_), constants_.READING_HORIZON);
    // A prompt is read for the rest of the text.
    if (n_prompt_unread_ > 0 && n_since_free_ == n_tokens_)
        horizon = std::max(constants_.USUAL_LENGTH - double(n_tokens_), horizon);
    return double(n_sharers_) * extra <= std::min(horizon, double(n_most_) - double(n_tokens_)) * saved;
}

// The number of further tokens with the largest sum of values, less what their passes cost at the rule's rate; and that gain.
std::pair<size_t, double> LengthPolicy::most_worth(const std::vector<double> & values, size_t n_drafted, size_t n_most) const {
    std::pair<size_t, double> best{0, 0};
    double value = 0;
    for (size_t n = 1; n <= std::min(values.size(), n_most); n++) {
        value += values[n - 1];
        const double gain = is_fixed() ? value : value - rule_.rate * (curve_[n_drafted + n] - curve_[n_drafted]);
        if (gain > best.second) best = {n, gain};
    }
    return best;
}

// The largest number of tokens whose expected loss is small beside their expected gain; all of them where that holds for all.
size_t LengthPolicy::n_of_small_risk(const std::vector<double> & probabilities, const DraftCosts & draft) const {
    const size_t n_most = std::min(probabilities.size(), curve_.size() - 1);
    const double saved = plain();  // by each accepted token
    for (size_t n = n_most; n > 0; n--) {
        const size_t n_steps = (n + draft.n_per_step - 1) / draft.n_per_step;
        const double paid = curve_[n] - curve_[0] + draft.reading + double(n_steps) * draft.step;
        double risk = 0, won = 0, reached = 1;
        for (size_t k = 0; k < n; k++) {
            risk += reached * (1 - probabilities[k]) * std::max(paid - double(k) * saved, 0.0);
            reached *= probabilities[k];
            won += reached * saved;
        }
        if (risk <= constants_.SMALL_RISK * (won - paid) && (n == n_most || paid < won)) return n;
    }
    return 0;
}

}  // namespace ggufspec
