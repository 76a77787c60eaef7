// Decides how far to draft: before each round of a text, and before each token of a draft.
//
// Each decision depends on the tokens drawn so far and on the draft's distribution of the next token, never on the token
// that is about to be drawn. That keeps rejection sampling lossless.
#pragma once

#include <cstddef>
#include <deque>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "cost_model.h"
#include "stopping_rule.h"

namespace ggufspec {

// Logistic regression: the probability that a drafted token is accepted, given a model's logit gap (largest logit minus
// second largest). Fitted online by Newton steps on the likelihood.
class AcceptanceModel {
public:
    // probability = 1 / (1 + exp(-(intercept + slope * gap))). `weight`: number of observations that these first values
    // count as.
    AcceptanceModel(double intercept, double slope, double weight);

    double probability(double gap) const;

    // Learns that a token with this gap was, or would have been, accepted with probability `acceptance`.
    void observe(double gap, double acceptance);

    double intercept() const { return intercept_; }
    double slope() const { return slope_; }

private:
    double intercept_, slope_;
    double h00_, h01_, h11_;  // the Hessian of the observations
};

using Coefficients = std::pair<double, double>;  // intercept and slope of an AcceptanceModel

// How many tokens of an existing draft to verify.
struct PrefixLength {
    size_t n_draft = 0;
    double expected = 0;       // accepted tokens
    bool beats_model = false;  // after the forced tokens, it has a higher expected gain than drafting with the draft model
};

enum class Action { draft, skip, plain };  // see ggufspec/drafting/draft_length.py

// Why a draft was not longer; the texts are in ggufspec/drafting/draft_length.py.
enum class Stop { none, limit, unlikely, uncertain, text_ends, measuring_plain, failed, no_gain, unread, no_balance };

// How far to draft in each round of a text.
//
// With costs, it chooses the length with the most expected tokens per second, 0 if drafting is not faster. The target's
// latest logit gaps show how predictable the text is at present, even while nothing is drafted. The pair's balance limits the
// time lost to rejected drafts. Without costs, it drafts as many tokens as each round allows; in a tree, the likeliest ones.
//
// A round: start_round or prefix_length; should_evaluate and should_draw alternately; the observe functions.
class LengthPolicy {
public:
    // costs: null: the length is fixed. prior: the acceptance of a new pair; known: the one that the text starts from.
    // has_model: there is a draft model.
    LengthPolicy(const Constants & constants, std::shared_ptr<CostModel> costs, Coefficients prior, Coefficients known,
                 double block_bonus, bool has_model);

    // Begins a text; returns whether the draft model should read its prompt before the first round. If not, it does so once
    // that pays. n_unread: prompt tokens that it has not read; n_most: maximum tokens of the text. Always for a fixed length.
    bool begin_text(size_t n_unread, size_t n_most);

    // The next target pass is shared by so many texts. Ignored if costs are frozen: other texts must not change a text with
    // a seed.
    void set_n_sharers(size_t n_sharers);

    // Starts a round of at most n_max drafted tokens; returns what the draft model is to do. n_unread: number of tokens that
    // the draft model has not read yet.
    Action start_round(size_t n_max, size_t n_unread);

    // How many tokens to use of a draft that already exists, such as an n-gram match. probabilities: of each token, if the
    // tokens before it are accepted; forced: of the forced tokens before it. is_own: false for drafts from other texts.
    PrefixLength prefix_length(std::vector<double> probabilities, std::vector<double> forced, bool is_own);

    // Adds tokens that cost no draft step, such as forced ones, and counts them as drawn. probabilities: of each token, if the
    // tokens before it are accepted. Returns how many of them to draft.
    size_t take(const std::vector<double> & probabilities);

    // Chooses how many tokens to draw, instead of the thresholds, where the gaps of the next distributions are known before
    // any token is drawn from them. Lossless: the choice depends on distributions, and on tokens that were drawn.
    void foresee(const std::vector<double> & gaps);

    bool should_evaluate();        // whether to run the draft model for the next distribution
    bool should_draw(double gap);  // whether to draw a token from a distribution with that logit gap
    void draw_declined();          // the token that should_draw has just declined was drawn after all

    // How many further tokens pay for their passes, in a draft of n_drafted. values: the acceptance probability of each,
    // falling. It can skip past an expensive batch size to a larger, cheaper one.
    size_t n_worth(const std::vector<double> & values, size_t n_drafted) const;

    // Price of a draft step for a branch, in tokens; n_read: further tokens to read.
    double step_price(double n_read) const;

    // Branches were added, with an expected number of `value` accepted nodes. They took n_steps further draft steps, which
    // read n_read further tokens.
    void observe_growth(double value, size_t n_steps, size_t n_read);

    // The target's logit gaps at the tokens that a round has added.
    void observe_gaps(const std::vector<double> & gaps);

    // The verdict on a draft of the draft model. acceptances: of the first n_accepted + 1 distributions that it computed, the
    // probability that a token drawn from each is accepted if the tokens before it are; empty: nothing is learned.
    void observe_verdict(size_t n_accepted, const std::vector<double> & acceptances);

    // After each round, and any observe_verdict. target_seconds: of the pass with verification.
    void observe_round(size_t n_tokens, size_t n_drafted, size_t n_sharers, double draft_seconds, double target_seconds);

    // The draft model has failed: the rest of the text is written without it.
    void give_up_model();

    // Of the round.
    size_t n_reachable() const;  // maximum length of the draft if all its tokens are likely
    size_t n_max() const { return n_max_; }
    size_t n_drawn() const { return n_drawn_; }
    size_t n_taken() const { return n_taken_; }
    size_t n_evaluated() const { return gaps_.size(); }
    double reached() const { return reached_; }  // the probability that all drawn tokens are accepted
    double expected() const;                     // number of accepted tokens
    const std::vector<double> & gaps() const { return gaps_; }  // of all distributions
    Stop stop() const { return stop_; }

    // Of the text.
    bool is_fixed() const { return costs_ == nullptr; }
    const std::shared_ptr<CostModel> & costs() const { return costs_; }
    const StoppingRule & rule() const { return rule_; }
    const AcceptanceModel & acceptance() const { return acceptance_; }
    double mean_acceptance() const { return mean_acceptance_; }  // probability that the draft's next token is accepted
    double mean_observed() const { return n_observed_ ? sum_observed_ / double(n_observed_) : -1; }  // -1: nothing was
    size_t n_prompt_unread() const { return n_prompt_unread_; }  // prompt tokens that the draft model still has to read
    size_t n_rounds() const { return n_rounds_; }
    size_t n_without_gain() const { return n_without_gain_; }  // rounds in which drafting would not have been faster

    double least = 0;  // tokens accepted with a lower probability are not drawn; reset by each round
    const double block_bonus;
    bool has_model;

private:
    struct DraftCosts {
        double reading = 0, step = 0;  // seconds before the first step, and of each
        size_t n_per_step = 1;
    };

    void update();
    void start(size_t n_max);
    void add(double reached);
    size_t n_room() const;  // tokens that can be added to the draft
    double plain() const { return costs_->plain_of_text(n_sharers_); }
    Stop reason_to_skip(size_t n_max, size_t n_affordable) const;
    bool should_measure_plain() const;
    bool pays_for_reading() const;
    std::pair<size_t, double> most_worth(const std::vector<double> & values, size_t n_drafted, size_t n_most) const;
    size_t n_of_small_risk(const std::vector<double> & probabilities, const DraftCosts & draft) const;

    const Constants constants_;
    const std::shared_ptr<CostModel> costs_;
    const AcceptanceModel prior_;
    AcceptanceModel acceptance_;
    StoppingRule rule_;
    std::vector<double> curve_;  // seconds of passes over 1, 2 ... tokens of this text; empty: not weighed
    std::deque<double> latest_;  // the target's gaps
    double mean_acceptance_ = 0, sum_observed_ = 0;
    size_t n_observed_ = 0;
    size_t n_drafts_ = 1, n_accepted_ = 1;  // rounds that used the draft model, and their tokens; a first round is assumed
    size_t n_rounds_ = 0, n_without_gain_ = 0, n_sharers_ = 1;
    size_t n_tokens_ = 0, n_most_ = std::numeric_limits<size_t>::max();
    size_t n_since_free_ = 0;  // tokens since n-grams were last drafted
    size_t n_prompt_unread_ = 0;
    bool was_plain_ = false;   // the round before drafted nothing
    bool is_current_ = false;  // the rule was updated in this round
    bool has_failed_ = false;

    // Of the round.
    size_t n_unread_ = 1, n_max_ = 0, n_drawn_ = 0, n_taken_ = 0;
    double reached_ = 1, expected_ = 0, grown_ = 0;
    size_t n_grown_steps_ = 0, n_grown_read_ = 0;
    std::vector<double> gaps_;
    Stop stop_ = Stop::none;
    bool is_foreseen_ = false;
    size_t n_foreseen_ = 0;  // total number of tokens to draw
};

}  // namespace ggufspec
