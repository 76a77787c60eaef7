// Measures the seconds that target passes and draft steps take on this machine.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <vector>

namespace ggufspec {

// The tuned numbers of costs and of the draft length, by name; their meaning and evidence: ggufspec/drafting/constants.py.
// clang-format off
#define GGUFSPEC_CONSTANTS(X) \
    X(N_FIRST_MEASUREMENTS) X(COST_LEARNING_RATE) X(OUTLIER) X(UNMEASURED_SLOPE) X(LEAST_DISTANCE) \
    X(UNMEASURED_STEP) X(UNMEASURED_READ) X(FEW_BESIDE_BLOCK) X(N_FRESH_PASSES) X(DISCOUNT_PER_PASS) \
    X(MIN_DISCOUNT) X(PRIOR_WEIGHT) X(N_GAPS) X(READING_HORIZON) \
    X(USUAL_LENGTH) X(START_BALANCE) X(MAX_BALANCE) X(INVESTED_SHARE) X(SMALL_RISK) \
    X(N_PLAIN)
// clang-format on
struct Constants {
#define GGUFSPEC_MEMBER(name) double name;
    GGUFSPEC_CONSTANTS(GGUFSPEC_MEMBER)
#undef GGUFSPEC_MEMBER
    std::vector<double> PRIOR_GAPS;
};

// Seconds known before generation: see Start in ggufspec/drafting/cost_model.py. An empty target: nothing is known.
struct StartingCosts {
    std::vector<double> target;
    double step = 0, read = 0;
    bool is_measured = false, guesses_step = false;
    bool is_given() const { return !target.empty(); }
};

// Seconds of target passes (with verification) by number of tokens, and of draft steps.
//
// Unmeasured sizes are interpolated.
class CostModel {
public:
    // A number of tokens whose passes were measured.
    struct Size {
        double seconds;
        size_t n_measured;
        size_t at;  // n_passes at the latest one
    };

    // n_sharers: maximum number of texts in a pass, each with at most n_most tokens. n_per_step: tokens that the draft model
    // predicts in one step.
    CostModel(const Constants & constants, size_t n_most, size_t n_sharers, size_t n_per_step, StartingCosts start);

    // The next measurements are of passes in these circumstances, such as a number of threads, which the caller numbers from
    // the usual ones, 0; they are ignored if the passes were disturbed. Each number has measurements of its own, which start
    // from those before it.
    void use(size_t circumstances, bool is_disturbed);

    // Learns that a pass over n_tokens took so many seconds, with verification.
    void observe_target(size_t n_tokens, double seconds);

    // Learns the seconds of a single-token pass after another single-token pass. After a larger batch it is slower: llama.cpp
    // plans its graph again at each change of size.
    void observe_plain(double seconds);

    // Learns that n_steps draft steps in sequence took so many seconds in total. The first step also read n_further tokens.
    void observe_draft(size_t n_steps, double seconds, size_t n_further);

    // A copy for passes of other sizes, with the present measurements that fit them.
    CostModel resized(size_t n_most, size_t n_sharers, size_t n_per_step, StartingCosts start) const;
    // The same for passes of the sizes that `other` has.
    CostModel resized_as(const CostModel & other) const;
    // A copy in which the expected seconds of all sizes, and of drafting, count as measured.
    CostModel as_measured() const;

    // Replaces all measurements by these, as if each had been measured just now, twice. 0: not measured, but for sizes.
    void restore(const std::map<size_t, double> & sizes, double plain, double step, double read);

    // How many passes over n_tokens were measured.
    size_t n_measured(size_t n_tokens) const;

    // Seconds of a pass over 1, 2 ... n_most * n_sharers tokens, measured or assumed.
    const std::vector<double> & curve() const;

    // Seconds attributed to n_tokens (at most n_most) of one text in a pass of n_sharers texts: the larger of two prices, an
    // equal share of a pass in which all texts have that many tokens, and the price of adding the tokens to a pass in which
    // every other text has one token.
    double of_text(size_t n_tokens, size_t n_sharers) const;
    std::vector<double> per_text(size_t n_sharers) const;  // of 1, 2 ... n_most tokens

    double plain() const;  // seconds per token without drafting
    // The same of one text in a pass of n_sharers texts.
    double plain_of_text(size_t n_sharers) const { return n_sharers <= 1 ? plain() : of_text(1, n_sharers); }
    double step() const;  // seconds of a draft step, in which the draft model reads one token
    double read() const;  // seconds that the draft model takes for each token that it reads in a batch
    size_t n_steps(size_t n_tokens) const { return (n_tokens + n_per_step_ - 1) / n_per_step_; }
    double drafting(size_t n_tokens) const { return double(n_steps(n_tokens)) * step(); }  // seconds of so many distributions
    bool draft_cannot_pay() const;  // whether drafting is slower than plain decoding even if every token is accepted
    bool knows_draft() const { return known_.n_steps > 0 || knows_step_before(); }  // whether a draft step was measured

    // Measurements: seconds by number of tokens, and as observe_plain and observe_draft learned them; 0: none.
    std::map<size_t, double> sizes() const;
    double plain_measured() const { return known_.plain; }
    double step_measured() const { return known_.step; }
    double read_measured() const { return known_.read; }

    size_t n_most() const { return n_most_; }
    size_t n_sharers() const { return n_sharers_; }
    size_t n_per_step() const { return n_per_step_; }
    size_t n_passes() const { return known_.n_passes; }  // measured

    bool is_frozen = false;  // if so, measurements are ignored

    // What the pair's drafts have saved, less what they have lost, in plain passes: see LengthPolicy. A share of the generated
    // tokens is added, so that a losing pair can try again. An upper limit keeps old savings from paying for many new losses.
    double balance;

private:
    struct Measured {
        std::map<size_t, Size> sizes;
        size_t n_passes = 0;
        double plain = 0, step = 0, read = 0;
        size_t n_plain = 0, n_steps = 0, step_at = 0;
    };

    bool ignores() const { return is_frozen || is_disturbed_; }
    size_t n_largest() const { return n_most_ * n_sharers_; }
    bool is_measured_before() const { return start_.is_given() && start_.is_measured; }
    bool knows_step_before() const { return is_measured_before() && !start_.guesses_step; }
    double usual_read() const;  // assumed value of `read`, in draft steps, before it is measured

    // Whether this is the device's first pass of this size (0: a draft step): it may have compiled its program.
    bool is_compiled_for(size_t n_tokens);
    double discount(size_t age, size_t n_measured) const;
    double updated(double old, double seconds, size_t n_measured) const;
    std::vector<double> positions() const;
    std::vector<double> interpolated() const;

    Constants constants_;
    size_t n_most_, n_sharers_, n_per_step_;
    StartingCosts start_;
    std::vector<double> positions_;  // a coordinate for each number of tokens; interpolation is linear in it
    std::set<size_t> warm_;  // sizes of passes run so far on the device
    Measured known_;
    std::map<size_t, Measured> of_others_;  // by circumstances
    size_t circumstances_ = 0;
    bool is_disturbed_ = false;
    mutable std::vector<double> curve_;  // empty: to be interpolated
};

}  // namespace ggufspec
