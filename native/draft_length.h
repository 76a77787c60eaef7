// How far to draft in a round: costs and chances in, decisions out. Knows numbers only: no clocks, no models, no tokens.
//
// What is asked here depends on tokens already drawn, and on the draft's distribution of the next one, never on the token
// about to be dropped: that keeps rejection sampling lossless.
#pragma once

#include <cstddef>
#include <vector>

namespace ggufspec {

// The chance that a drafted token stands, by how sure its draft was: a logistic line, learned from what came by Newton's
// steps on the likelihood, older lessons slowly forgotten.
class Chance {
public:
    // chance = 1 / (1 + exp(-(at_zero + slope * gap))); `weight`: lessons that this line counts as; `memory`: lessons after
    // which one has lost most of its weight.
    Chance(double at_zero, double slope, double weight, double memory);

    double of(double gap) const;

    // `came`: how likely it was in hindsight.
    void learn(double gap, double came);

    double at_zero() const { return at_zero_; }
    double slope() const { return slope_; }

private:
    double at_zero_, slope_, floor_, keep_;
    double h00_, h01_, h11_;  // the Hessian of what was learned
};

// When to go on, after n drafted tokens: as soon as the draft still stands with that chance.
struct Rule {
    std::vector<double> look_from;  // (n_most): to ask the draft for the next distribution; above 1: never
    std::vector<double> take_from;  // (n_most): to draw from it, its own chance included
    double tokens = 0, seconds = 0; // what a round brings, and takes
    double rate = 0;                // what a second is worth: the tokens that it brings
};

// The rule that brings the most tokens a second.
//
// One more drafted token is worth the chance that it is reached and accepted; it costs a draft step and a step on the
// target's staircase. Time is worth the tokens that it would otherwise bring: so the best rule maximises
// tokens - rate * seconds of a round, where rate is the best that the rule itself can reach (Dinkelbach,
// https://doi.org/10.1287/mnsc.13.7.492). It is found by backward induction over the chance that the draft still stands,
// and so looks past a stair to the landing.
//
// curve (n_most + 1): seconds of a pass over 1, 2 ... tokens; step: of a draft step; chances: that the next token stands,
// each as often; rate: where to start to look; worth: tokens that a second brings at least, by whatever else is done.
//
// bonus: block verification judges a draft as a whole, so a token may still be saved by those that follow it: the token
// after n others is worth (1 + bonus * n) times its chance. 0 for rules that judge token by token.
Rule best_rule(const std::vector<double> & curve, double step, const std::vector<double> & chances, double rate, double worth,
               double bonus = 0);

// The best length of a draft that is there already, at no cost.
struct Weighed {
    size_t n_draft = 0;
    double gain = 0;      // tokens - rate * seconds of the round
    double expected = 0;  // drafted tokens that stand
};

// What a round asks: begin, then looks and takes in turns. Without a rule, always on.
class LengthRule {
public:
    enum class End { none, limit, unlikely, unsure };

    // `bonus`: see best_rule; the chance is that of a token with none behind it.
    explicit LengthRule(const Chance & chance, double bonus = 0) : chance(chance), bonus(bonus) {}

    // Finds the best rule for these costs, and for tokens with gaps like these.
    void reckon(std::vector<double> curve, double step, const std::vector<double> & gaps, double worth);
    const Rule & rule() const { return rule_; }

    // What a round by the rule gains, as Weighed has it.
    double prospect() const { return rule_.tokens - rule_.rate * rule_.seconds; }

    // How much of a draft to take whose tokens stand with these chances, each if those before it do.
    Weighed weigh(const std::vector<double> & chances) const;

    void begin(size_t n_max);

    // Whether to ask the draft for its distribution of the next token.
    bool looks();

    // Whether to draw it. `gap`: between the two largest logits, how sure the draft is.
    bool takes(double gap);

    size_t n_looked() const { return n_looked_; }
    size_t n_taken() const { return taken_.size(); }
    double expected() const { return expected_; }
    End end() const { return end_; }
    const std::vector<double> & seen() const { return seen_; }

    Chance chance;
    double bonus;

private:
    Rule rule_;
    std::vector<double> curve_;
    size_t n_max_ = 0, n_looked_ = 0;
    double still_ = 1, expected_ = 0;
    std::vector<double> taken_, seen_;  // gaps of this round: of the tokens that were taken, of all that were looked at
    End end_ = End::none;
};

}  // namespace ggufspec
