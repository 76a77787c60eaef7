#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace ggufspec {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr size_t kLanes = 16;   // independent accumulators, so that loops over a row vectorise
constexpr size_t kBlock = 256;  // a draw looks at blocks of this many tokens first

// The largest logit, NaN passed over; -infinity if there is none.
float largest_of(const float * row, size_t n) {
    float lanes[kLanes];
    std::fill(lanes, lanes + kLanes, kNever);
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        for (size_t lane = 0; lane < kLanes; lane++) {
            lanes[lane] = row[i + lane] > lanes[lane] ? row[i + lane] : lanes[lane];
        }
    }
    for (; i < n; i++) lanes[0] = row[i] > lanes[0] ? row[i] : lanes[0];
    return *std::max_element(lanes, lanes + kLanes);
}

double sum_of(const float * row, size_t n) {
    double lanes[kLanes] = {};
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        for (size_t lane = 0; lane < kLanes; lane++) lanes[lane] += row[i + lane];
    }
    for (; i < n; i++) lanes[0] += row[i];
    return std::accumulate(lanes, lanes + kLanes, 0.0);
}

// Divides the kept weights by their sum; the sum is at least 1, because the largest weight is exp(0).
void normalise(float * probs, size_t n_vocab) {
    const float scale = static_cast<float>(1.0 / sum_of(probs, n_vocab));
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

    for (size_t i = 0; i < n_vocab; i++) row[i] = std::isnan(row[i]) ? kNever : row[i];
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
    const float * row = logits;
    if (!sampling.logit_bias.empty()) {
        std::copy(logits, logits + n_vocab, probs);
        for (const auto & [token, bias] : sampling.logit_bias) probs[token] += bias;
        row = probs;
    }
    const float largest = largest_of(row, n_vocab);
    if (!std::isfinite(largest)) return false;

    if (sampling.temperature <= 0) {
        const size_t best = std::find(row, row + n_vocab, largest) - row;
        std::fill(probs, probs + n_vocab, 0.0f);
        probs[best] = 1.0f;
        return true;
    }
    if (sampling.top_k > 0 || sampling.top_p < 1 || sampling.min_p > 0) {
        if (row != probs) std::copy(row, row + n_vocab, probs);
        truncated(probs, n_vocab, sampling);
    } else {
        const float inverse = static_cast<float>(1.0 / sampling.temperature);
        for (size_t i = 0; i < n_vocab; i++) {
            probs[i] = row[i] <= largest ? std::exp((row[i] - largest) * inverse) : 0.0f;  // NaN: never
        }
    }
    normalise(probs, n_vocab);
    return true;
}

int32_t pick(const float * probs, size_t n_vocab, double coin) {
    thread_local std::vector<double> blocks;
    blocks.clear();
    double total = 0;
    for (size_t i = 0; i < n_vocab; i += kBlock) {
        blocks.push_back(sum_of(probs + i, std::min(kBlock, n_vocab - i)));
        total += blocks.back();
    }
    const double goal = coin * total;
    double sum = 0;
    size_t block = 0;
    while (block + 1 < blocks.size() && sum + blocks[block] <= goal) sum += blocks[block++];
    // Rounding may leave the goal just behind the last token of a block: then that one it is.
    size_t last = n_vocab;
    for (size_t i = block * kBlock; i < n_vocab; i++) {
        if (probs[i] <= 0) continue;
        last = i;
        sum += probs[i];
        if (sum > goal) break;
    }
    while (last == n_vocab && block > 0) {  // nothing but zeros from here on
        for (size_t i = block * kBlock; i-- > (block - 1) * kBlock && last == n_vocab;) {
            if (probs[i] > 0) last = i;
        }
        block--;
    }
    return static_cast<int32_t>(last == n_vocab ? 0 : last);
}

}  // namespace ggufspec
