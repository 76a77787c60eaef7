// From logits to distributions to tokens; random numbers are arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "chain.h"
#include "kernels.h"

namespace ggufspec {

// Which tokens may follow, one bit for each; those without a bit may not.
struct Mask {
    const uint32_t * words;
    size_t n_words;

    size_t n_allowed(size_t n_vocab) const;

    // Sets the logits of all others to -infinity.
    void apply(float * row, size_t n_vocab) const;
};

// A distribution over the vocabulary: a list of the tokens that truncation leaves or, without truncation, a function of
// the logits that is evaluated when it is read. So a hundred thousand probabilities are never written or read.
class Row {
public:
    // The distribution of a row of logits after `text`, over the tokens of the mask (null: all). Unless `keep`, the logits
    // must outlive it. False if no token can be drawn: the mask leaves none, all are -infinity or NaN, or one is infinite.
    bool set(const float * logits, size_t n_vocab, const Sampling & sampling, const Text & text, const Mask * mask, bool keep);

    // The distribution in proportion to these weights (n_vocab). False if they are all 0.
    bool set_weights(const float * weights, size_t n_vocab);

    // The same tokens at another temperature of the last sampler; 0: the most likely one for certain.
    void set_temperature(float temperature);

    // One token for certain; -1: none can be drawn.
    static Row certain(int32_t token);

    // This row at another temperature; valid as long as this one.
    Row at(float temperature) const;

    // The distribution of `other` without a token, renormalised, with a copy of its logits. At
    // temperature 0 the next likeliest token is certain. `other` may be this one. False if nothing is left; this one is
    // then a copy of the other.
    bool set_without(const Row & other, int32_t token);

    // A copy that does not depend on the logits of `other`.
    void set_copy(const Row & other);

    float of(int32_t token) const;

    // By how much the largest logit exceeds the second largest, after truncation and before temperature; infinity where
    // there is no second.
    float gap() const;

    // How many probabilities there are to read.
    size_t n_values() const { return is_list_ ? tokens_.size() : n_vocab_; }

    // All probabilities (n_vocab).
    void write(float * probs) const;

    // By how much the largest logit of the tokens to draw from, but for one, exceeds the second largest; below 0: there is none.
    float gap_without(int32_t token) const;

    // The token at which the cumulative probability first exceeds the uniform in [0, 1).
    int32_t pick(double uniform) const;

    // The sum over all tokens of min(factor * this, draft).
    double overlap(float factor, const Row & draft) const;

    // A draw from max(factor * this - draft, 0), normalised. If rounding leaves nothing, the two are equal, and the
    // draw is from this one.
    int32_t pick_excess(float factor, const Row & draft, double uniform) const;

    // max(factor * other - draft, 0), normalised; returns its sum. 0, and nothing is set: rounding leaves nothing. `other`
    // may be this one. Has no other temperatures.
    double set_excess(const Row & other, float factor, const Row & draft);

    // The probability that a token of the draft other than `rejected` is accepted, if `rejected` was drawn first and was
    // rejected: the sum of min(norm(max(this - draft, 0)), draft without it). -1: it cannot be rejected.
    double second_overlap(const Row & draft, int32_t rejected) const;

private:
    void share(const Row & other);  // its tokens and logits, which must outlive this one; not their probabilities
    bool finish_list(Candidates & candidates, float temperature);
    void set_list(Candidates & candidates);
    void set_rate(float rate);
    void keep_row(const float * logits);
    bool set_plain(std::vector<float> & weights, double & sum);
    void weights(size_t begin, size_t end, float * out) const;
    void excess(size_t begin, size_t end, float factor, const Row & draft, float * left) const;

    size_t n_vocab_ = 0;
    // The tokens to draw from: a sorted list with its logits or, without a list, all.
    bool is_list_ = false;
    std::vector<int32_t> tokens_;
    std::vector<float> logits_;
    const float * row_ = nullptr;
    std::vector<float> own_;  // the row, if it was changed or kept
    float largest_ = 0;
    int32_t likeliest_ = 0;

    // Their probabilities: one token for certain, those of the list, or those of the row with sums by blocks. A plain row
    // has weights instead of logits.
    bool is_certain_ = false;
    bool is_plain_ = false;
    std::vector<float> probs_;
    Softmax softmax_{};
    std::vector<double> blocks_;
};

}  // namespace ggufspec
