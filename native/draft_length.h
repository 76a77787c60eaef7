// How far to draft in one round: from costs in seconds and acceptance probabilities to a stopping rule.
//
// Each decision depends on the tokens drawn so far and on the draft's distribution of the next token, never on the token
// that is about to be drawn. That keeps rejection sampling lossless.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace ggufspec {

// Logistic regression: the probability that a drafted token is accepted, given a model's logit gap (largest logit minus
// second largest). Fitted online by Newton steps on the likelihood; old observations fade out.
class AcceptanceModel {
public:
    // probability = 1 / (1 + exp(-(intercept + slope * gap))). `weight`: number of observations that these first values
    // count as; `memory`: observations after which one has lost most of its weight.
    AcceptanceModel(double intercept, double slope, double weight, double memory);

    double probability(double gap) const;

    // `acceptance`: the probability with which a token with that gap was, or would have been, accepted.
    void observe(double gap, double acceptance);

    double intercept() const { return intercept_; }
    double slope() const { return slope_; }

private:
    double intercept_, slope_, floor_, keep_;
    double h00_, h01_, h11_;  // the Hessian of the observations
};

// Thresholds on the probability that the whole draft is still accepted, by the number n of tokens drawn so far.
struct StoppingRule {
    std::vector<double> evaluate_from;  // (n_most): run the draft model for the next distribution; above 1: never
    std::vector<double> draw_from;      // (n_most): draw from it, with the next token's own probability included
    double tokens = 0, seconds = 0;     // expected in a round
    double rate = 0;                    // tokens per second
};

// The rule with the most expected tokens per second.
//
// One more drafted token gains the probability that it is reached and accepted; it costs a draft step and a step on the
// target's cost curve. The best rule maximises tokens - rate * seconds of a round, where rate is the best rate that the
// rule itself can reach (Dinkelbach, https://doi.org/10.1287/mnsc.13.7.492). It is found by backward induction over the
// probability that the draft is still accepted, so it looks beyond an expensive batch size to a cheaper one behind it.
//
// curve (n_most + 1): seconds of a target pass over 1, 2 ... tokens; step: seconds of a draft step, which gives n_per_step
// distributions: if more than one, they are a block, and a draft has no second one; probabilities: equally likely
// acceptance probabilities of the next token; rate: where the iteration starts; min_rate: tokens per second that other
// ways of decoding reach.
//
// block_bonus: block verification judges a draft as a whole, so later tokens can save an earlier one: the token after n
// others counts (1 + block_bonus * n) times its probability. 0 for rules that judge token by token.
StoppingRule best_rule(const std::vector<double> & curve, double step, const std::vector<double> & probabilities, double rate,
                       double min_rate, double block_bonus = 0, size_t n_per_step = 1);

// How much of an existing draft to use. Computing it cost nothing, so only verification is paid for.
struct PrefixLength {
    size_t n_draft = 0;
    double gain = 0;      // tokens - rate * seconds of the round
    double expected = 0;  // accepted tokens
};

// The state of one round: start, then should_evaluate and should_draw in turns. Before the first `update` it allows
// every draft up to n_max.
class LengthRule {
public:
    enum class Stop { none, limit, unlikely, uncertain };

    // `block_bonus`: see best_rule.
    explicit LengthRule(const AcceptanceModel & acceptance, double block_bonus = 0)
        : acceptance(acceptance), block_bonus(block_bonus) {}

    // Finds the best rule: see best_rule.
    void update(std::vector<double> curve, double step, const std::vector<double> & probabilities, double min_rate,
                size_t n_per_step = 1);
    const StoppingRule & rule() const { return rule_; }

    // What a round by the rule gains, comparable with PrefixLength::gain.
    double gain() const { return rule_.tokens - rule_.rate * rule_.seconds; }

    // How much to use of an existing draft; probabilities: each token's, if those before it are accepted.
    PrefixLength prefix_length(const std::vector<double> & probabilities) const;

    // A round of at most n_max drafted tokens starts; no more than the cost curve covers are drafted.
    void start(size_t n_max);

    // How many further tokens of these probabilities to draft, which cost no draft step; they count as drawn.
    size_t take(const std::vector<double> & probabilities);

    // The gaps of the next distribution, and of those behind it, are known before a token is drawn from any of them: chooses
    // how many tokens are drawn from here on, instead of the thresholds. Lossless: it depends on distributions, and on tokens
    // that were drawn.
    void foresee(const std::vector<double> & gaps);

    // Whether to run the draft model for the next distribution.
    bool should_evaluate();

    // Whether to draw a token from a distribution with that logit gap.
    bool should_draw(double gap);

    // The token that should_draw has just declined is drawn all the same.
    void draw_declined();

    // Learns from the first of the round's distributions how likely a token of each was to be accepted.
    void observe(const std::vector<double> & acceptances);

    size_t n_max() const { return n_max_; }
    size_t n_reachable() const;  // the most tokens that the round drafts if all of them are likely
    double reached() const { return reached_; }  // the probability that all drawn tokens are accepted
    size_t n_evaluated() const { return gaps_.size(); }
    size_t n_taken() const { return n_taken_; }
    size_t n_drawn() const { return n_drawn_; }
    double expected() const { return std::min(expected_, double(n_drawn_)); }  // the bonus may exceed it
    Stop stop() const { return stop_; }
    const std::vector<double> & gaps() const { return gaps_; }

    AcceptanceModel acceptance;
    double block_bonus;
    double least = 0;  // no token is drawn that is accepted with a lower probability; until the next start

private:
    void add(double reached);

    StoppingRule rule_;
    std::vector<double> curve_;
    size_t n_max_ = 0, n_drawn_ = 0, n_taken_ = 0;
    double reached_ = 1, expected_ = 0;  // expected_: how many drawn tokens are accepted, on average
    std::vector<double> gaps_;           // of all distributions of this round
    Stop stop_ = Stop::none;
    bool is_foreseen_ = false;
    size_t n_foreseen_ = 0;  // tokens that are drawn in all
};

}  // namespace ggufspec
