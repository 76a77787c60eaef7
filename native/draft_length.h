// Decides how far to draft in one round: computes a stopping rule from costs in seconds and acceptance probabilities.
//
// Each decision depends on the tokens drawn so far and on the draft's distribution of the next token, never on the token
// that is about to be drawn. That keeps rejection sampling lossless.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "cost_model.h"

namespace ggufspec {

// Logistic regression: the probability that a drafted token is accepted, given a model's logit gap (largest logit minus
// second largest). Fitted online by Newton steps on the likelihood; old observations fade out.
class AcceptanceModel {
public:
    // probability = 1 / (1 + exp(-(intercept + slope * gap))). `weight`: number of observations that these first values
    // count as; `memory`: observations after which one has lost most of its weight.
    AcceptanceModel(double intercept, double slope, double weight, double memory);

    double probability(double gap) const;

    // Learns that a token with this gap was, or would have been, accepted with probability `acceptance`.
    void observe(double gap, double acceptance);

    double intercept() const { return intercept_; }
    double slope() const { return slope_; }

private:
    double intercept_, slope_, floor_, keep_;
    double h00_, h01_, h11_;  // the Hessian of the observations
};

// Least probabilities that the whole draft is still accepted, by the number n of tokens drawn so far.
struct StoppingRule {
    std::vector<double> evaluate_from;  // (n_most): to run the draft model for the next distribution; above 1: never run it
    std::vector<double> draw_from;      // (n_most): to draw from it; with the next token's own probability as a factor
    double tokens = 0, seconds = 0;     // expected values for a round
    double rate = 0;                    // tokens per second
};

// The rule with the most expected tokens per second.
//
// One more drafted token gains the probability that it is reached and accepted; it costs a draft step and a step on the
// target's cost curve. The best rule maximises tokens - rate * seconds of a round, where rate is the best rate that the
// rule itself can reach (Dinkelbach, https://doi.org/10.1287/mnsc.13.7.492). It is found by backward induction over the
// probability that the draft is still accepted, so it can skip past an expensive batch size to a larger, cheaper one.
//
// curve (n_most + 1): seconds of a target pass over 1, 2 ... tokens. step: seconds of a draft step, which computes n_per_step
// distributions; if there are several, they are a block, and a draft has only one block. probabilities: acceptance
// probabilities of the next token, each equally likely. rate: start of the iteration. min_rate: tokens per second of other
// ways of decoding.
//
// block_bonus: block verification judges a draft as a whole, so later tokens can save an earlier one: the token after n
// others counts (1 + block_bonus * n) times its probability. 0 for rules that judge token by token.
StoppingRule best_rule(const std::vector<double> & curve, double step, const std::vector<double> & probabilities, double rate,
                       double min_rate, double block_bonus = 0, size_t n_per_step = 1);

// How many tokens of an existing draft to use. The draft is free, so only verification has a cost.
struct PrefixLength {
    size_t n_draft = 0;
    double gain = 0;      // tokens - rate * seconds of the round
    double expected = 0;  // accepted tokens
};

// The state of one round: call start, then should_evaluate and should_draw alternately. Before the first `update` it
// allows every draft up to n_max.
class LengthRule {
public:
    enum class Stop { none, limit, unlikely, uncertain };

    // `block_bonus`: see best_rule.
    explicit LengthRule(const AcceptanceModel & acceptance, double block_bonus = 0)
        : acceptance(acceptance), block_bonus(block_bonus) {}

    // Finds the best rule: see best_rule.
    void update(std::vector<double> curve, double step, const std::vector<double> & probabilities, double min_rate,
                size_t n_per_step = 1);

    // The same at the costs of a text in a pass of n_sharers texts. by_target: the probability that the draft model's next
    // token is accepted, by the target's logit gap; its n_levels quantiles of the latest `gaps` are equally likely. Null: there
    // is no draft model. Returns the mean probability.
    double update(const CostModel & costs, size_t n_sharers, const AcceptanceModel * by_target, std::vector<double> gaps,
                  size_t n_levels);
    const StoppingRule & rule() const { return rule_; }

    // The expected gain of a round by the rule, comparable with PrefixLength::gain.
    double gain() const { return rule_.tokens - rule_.rate * rule_.seconds; }

    // How many tokens of an existing draft to use. probabilities: of each token, if the tokens before it are accepted.
    PrefixLength prefix_length(const std::vector<double> & probabilities) const;

    // How many further tokens pay for their passes, in a draft of n_drafted. values: the acceptance probability of each,
    // falling. It can skip past an expensive batch size to a larger, cheaper one.
    size_t n_worth(const std::vector<double> & values, size_t n_drafted) const;

    // The largest number of tokens whose expected loss is at most max_risk times their expected gain; all of them where
    // that holds for all. probabilities: of each token, if the tokens before it are accepted. plain: seconds per token
    // without drafts. reading, step: seconds of the draft model before its first step and of each, which computes n_per_step
    // tokens; 0 for a draft that costs nothing.
    size_t n_of_small_risk(const std::vector<double> & probabilities, double plain, double max_risk, double reading, double step,
                           size_t n_per_step) const;

    // Starts a round of at most n_max drafted tokens, limited to the length of the cost curve.
    void start(size_t n_max);

    // Adds tokens that cost no draft step, such as forced ones, and counts them as drawn. probabilities: of each token, if the
    // tokens before it are accepted. Returns how many of them to draft.
    size_t take(const std::vector<double> & probabilities);

    // Chooses how many tokens to draw, instead of the thresholds, where the gaps of the next distributions are known before
    // any token is drawn from them. Lossless: the choice depends on distributions, and on tokens that were drawn.
    void foresee(const std::vector<double> & gaps);

    // Whether to run the draft model for the next distribution.
    bool should_evaluate();

    // Whether to draw a token from a distribution with that logit gap.
    bool should_draw(double gap);

    // Notes that the token that should_draw has just declined was drawn after all.
    void draw_declined();

    // Learns the acceptance probabilities of the round's first distributions.
    void observe(const std::vector<double> & acceptances);

    size_t n_max() const { return n_max_; }
    size_t n_reachable() const;  // maximum length of the round's draft if all its tokens are likely
    double reached() const { return reached_; }  // the probability that all drawn tokens are accepted
    size_t n_evaluated() const { return gaps_.size(); }
    size_t n_taken() const { return n_taken_; }
    size_t n_drawn() const { return n_drawn_; }
    double expected() const { return std::min(expected_, double(n_drawn_)); }  // the bonus could exceed n_drawn_
    Stop stop() const { return stop_; }
    const std::vector<double> & gaps() const { return gaps_; }

    AcceptanceModel acceptance;
    double block_bonus;
    double least = 0;  // tokens accepted with a lower probability are not drawn; reset by start

private:
    void add(double reached);

    StoppingRule rule_;
    std::vector<double> curve_;
    size_t n_max_ = 0, n_drawn_ = 0, n_taken_ = 0;
    double reached_ = 1, expected_ = 0;  // expected_: expected number of accepted tokens
    std::vector<double> gaps_;           // of all distributions of this round
    Stop stop_ = Stop::none;
    bool is_foreseen_ = false;
    size_t n_foreseen_ = 0;  // total number of tokens to draw
};

}  // namespace ggufspec
