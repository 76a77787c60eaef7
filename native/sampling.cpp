#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace ggufspec {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

// Divides the kept weights by their sum; the sum is at least 1, because the largest weight is exp(0).
void normalise(float * probs, size_t n_vocab) {
    double total = 0;
    for (size_t i = 0; i < n_vocab; i++) total += probs[i];
    const float scale = static_cast<float>(1.0 / total);
    for (size_t i = 0; i < n_vocab; i++) probs[i] *= scale;
}

// How many of the sorted logits top-p and min-p keep. Both cut a tail, so the shorter prefix holds.
size_t kept_prefix(const float * logits, const std::vector<int32_t> & sorted, double top_p, double min_p) {
    const double largest = logits[sorted[0]];
    size_t n = sorted.size();
    if (top_p < 1) {
        double total = 0, sum = 0;
        for (int32_t token : sorted) total += std::exp(logits[token] - largest);
        for (size_t i = 0; i < n; i++) {
            sum += std::exp(logits[sorted[i]] - largest);
            if (sum >= top_p * total) n = i + 1;
        }
    }
    if (min_p > 0) {
        const double least = largest + std::log(min_p);
        size_t i = 1;
        while (i < n && logits[sorted[i]] >= least) i++;
        n = i;
    }
    return n;
}

void truncated(float * row, size_t n_vocab, const Sampling & sampling) {
    const auto more_likely = [row](int32_t a, int32_t b) { return row[a] != row[b] ? row[a] > row[b] : a < b; };
    thread_local std::vector<int32_t> sorted;
    thread_local std::vector<float> weights;

    sorted.resize(n_vocab);
    for (size_t i = 0; i < n_vocab; i++) sorted[i] = static_cast<int32_t>(i);
    if (sampling.top_k > 0 && static_cast<size_t>(sampling.top_k) < n_vocab) {
        std::nth_element(sorted.begin(), sorted.begin() + sampling.top_k - 1, sorted.end(), more_likely);
        sorted.resize(sampling.top_k);
    }
    std::sort(sorted.begin(), sorted.end(), more_likely);
    sorted.resize(kept_prefix(row, sorted, sampling.top_p, sampling.min_p));

    const double largest = row[sorted[0]];
    weights.resize(sorted.size());
    for (size_t i = 0; i < sorted.size(); i++) {
        weights[i] = static_cast<float>(std::exp((row[sorted[i]] - largest) / sampling.temperature));
    }
    std::fill(row, row + n_vocab, 0.0f);
    for (size_t i = 0; i < sorted.size(); i++) row[sorted[i]] = weights[i];
}

}  // namespace

bool to_probs(const float * logits, size_t n_vocab, const Sampling & sampling, float * probs) {
    std::copy(logits, logits + n_vocab, probs);
    for (size_t i = 0; i < sampling.n_bias; i++) probs[sampling.bias_tokens[i]] += sampling.bias_values[i];
    for (size_t i = 0; i < n_vocab; i++) {
        if (std::isnan(probs[i])) probs[i] = kNever;
    }

    const size_t best = std::max_element(probs, probs + n_vocab) - probs;
    const float largest = probs[best];
    if (!std::isfinite(largest)) return false;

    if (sampling.temperature <= 0) {
        std::fill(probs, probs + n_vocab, 0.0f);
        probs[best] = 1.0f;
        return true;
    }
    const bool truncates = sampling.top_k > 0 || sampling.top_p < 1 || sampling.min_p > 0;
    if (truncates) {
        truncated(probs, n_vocab, sampling);
    } else {
        const float inverse = static_cast<float>(1.0 / sampling.temperature);
        for (size_t i = 0; i < n_vocab; i++) probs[i] = std::exp((probs[i] - largest) * inverse);
    }
    normalise(probs, n_vocab);
    return true;
}

int32_t pick(const float * probs, size_t n_vocab, double coin) {
    double total = 0;
    for (size_t i = 0; i < n_vocab; i++) total += probs[i];
    const double goal = coin * total;
    double sum = 0;
    int32_t last = 0;
    for (size_t i = 0; i < n_vocab; i++) {
        if (probs[i] <= 0) continue;
        sum += probs[i];
        last = static_cast<int32_t>(i);
        if (sum > goal) break;
    }
    return last;
}

}  // namespace ggufspec
