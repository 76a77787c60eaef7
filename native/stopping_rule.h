// Down to which probability that the draft is still accepted it pays to draft on.
#pragma once

#include <cstddef>
#include <vector>

namespace ggufspec {

constexpr double kNeverReached = 2;  // a threshold that no probability reaches

// Least probabilities that the whole draft is still accepted, by the number n of tokens drawn so far.
struct StoppingRule {
    std::vector<double> evaluate_from;  // (n_most): to run the draft model for the next distribution; above 1: never run it
    std::vector<double> draw_from;      // (n_most): to draw from it; with the next token's own probability as a factor
    double tokens = 0, seconds = 0;     // expected values for a round
    double rate = 0;                    // tokens per second

    bool drafts() const { return evaluate_from.empty() || evaluate_from[0] <= 1; }
    double gain() const { return tokens - rate * seconds; }  // of a round
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

}  // namespace ggufspec
