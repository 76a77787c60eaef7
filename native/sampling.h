// Turns logits into distributions, and draws tokens from them; random numbers are arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "chain.h"
#include "kernels.h"

namespace ggufspec {

constexpr size_t kBlock = 1024;  // tokens per block of a row; a draw reads the sums of blocks first

// One bit for each token: set if the token may follow. Tokens beyond the words may not.
struct Mask {
    const uint32_t * words;
    size_t n_words;

    size_t n_allowed(size_t n_vocab) const;

    // Sets the logits of all other tokens to -infinity.
    void apply(float * row, size_t n_vocab) const;
};

// A distribution over the vocabulary: a list of the tokens that remain after truncation or, without truncation, a function
// of the logits that is evaluated when it is read. So a hundred thousand probabilities are never written or read.
class Row {
public:
    // Becomes the distribution of a row of logits after `text`, over the tokens of the mask (null: all). Unless `keep`, the
    // logits must outlive it. Returns false if no token can be drawn: the mask allows none, all logits are -infinity or NaN,
    // or one is infinite.
    bool set(const float * logits, size_t n_vocab, const Sampling & sampling, const Text & text, const Mask * mask, bool keep);

    // Becomes the distribution in proportion to these weights (n_vocab). Returns false if they are all 0.
    bool set_weights(const float * weights, size_t n_vocab);

    // A row in which one token is certain; -1: none can be drawn.
    static Row certain(int32_t token);

    // Becomes the distribution of `other` without a token, renormalised, with a copy of its logits. At temperature 0 the next
    // likeliest token is certain. `other` may be this row. If no token is left, returns false and becomes a copy of `other`.
    bool set_without(const Row & other, int32_t token);

    // Becomes a copy of `other` that does not depend on its logits.
    void set_copy(const Row & other);

    float of(int32_t token) const;

    // The difference of the two largest logits, after truncation and before temperature; infinity if there is only one.
    float gap() const;

    // What the state goes on with after this token: its probability; adaptive_p: that before it changed the probabilities.
    // `coin`: see Sampling::coin.
    float observed(const Sampling & sampling, int32_t token, double coin) const;

    // All probabilities (n_vocab).
    void write(float * probs) const;

    // The difference of the two largest logits of the tokens to draw from, without `token`; below 0 if no token is left.
    float gap_without(int32_t token) const;

    // The token at which the cumulative probability first exceeds the uniform in [0, 1).
    int32_t pick(double uniform) const;

    // The sum over all tokens of min(factor * this, draft).
    double overlap(float factor, const Row & draft) const;

    // A draw from max(factor * this - draft, 0), normalised. If rounding removes all mass, the two are equal, and the draw
    // is from this row.
    int32_t pick_excess(float factor, const Row & draft, double uniform) const;

    // Becomes max(factor * other - draft, 0), normalised; returns its sum. Returns 0 and leaves the row unchanged if rounding
    // removes all mass. `other` may be this row. Has no other temperatures.
    double set_excess(const Row & other, float factor, const Row & draft);

private:
    void share(const Row & other);  // shares the tokens and logits of `other`, which must outlive this row
    bool set_lowered(const Sampling & sampling, float temperature, bool keep);  // xtc alone; false: it needs an order
    bool set_branch(Candidates & candidates);  // one of those that a mixture is made of; false if no token can be drawn
    void set_list(Candidates & candidates);
    void temper(const Sampling & sampling, bool ends_tempered);
    // What adaptive_p made of tokens, and the logits before.
    struct Case {
        std::vector<int32_t> tokens;
        std::vector<float> probs, logits;
    };

    void set_adapted(const Candidates & candidates);  // by adaptive_p; the logits stay those before
    void scale(double weight);
    void add(const Row & other);  // of lists
    void set_logits(float temperature);  // those that have these probabilities
    float dynamic_temperature(const Sampling & sampling) const;
    void set_temperature(float temperature);  // for the same tokens; 0: the most likely token is certain
    void set_rate(float rate);
    void normalize();  // the sums of blocks
    void keep_row(const float * logits);
    bool set_plain(std::vector<float> & weights, double & sum);
    void weights(size_t begin, size_t end, float * out) const;
    void excess(size_t begin, size_t end, float factor, const Row & draft, float * left) const;

    size_t n_vocab_ = 0;
    // The tokens to draw from: a sorted list with its logits or, without a list, all tokens.
    bool is_list_ = false;
    std::vector<int32_t> tokens_;
    std::vector<float> logits_;
    const float * row_ = nullptr;
    std::vector<float> own_;  // the row, if it was changed or kept
    float largest_ = 0;
    int32_t likeliest_ = 0;

    // Their probabilities. is_certain_: one token is certain. With a list: probs_. Without one: softmax_ computes them, and
    // blocks_ has their sums by blocks. is_plain_: the row has weights instead of logits.
    bool is_certain_ = false;
    bool is_plain_ = false;
    std::vector<float> probs_;
    Softmax softmax_{};
    std::vector<double> blocks_;
    std::vector<Case> cases_;  // those of xtc, with their weights, if adaptive_p follows
};

}  // namespace ggufspec
