#include "penalties.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ggufspec {
namespace {

Text last(const Text & text, int64_t n) {
    if (n < 0 || static_cast<size_t>(n) >= text.n) return text;
    return {text.tokens + (text.n - n), static_cast<size_t>(n)};
}

using Counts = std::unordered_map<int32_t, int32_t>;

Counts counts_of(const Sampling & sampling, const Text & text) {
    Counts counts;
    const Text window = last(text, sampling.penalty_last_n);
    for (size_t i = 0; i < window.n; i++) counts[window.tokens[i]]++;
    return counts;
}

// Calls `use` with the tail of each sequence breaker that begins with a token.
template <typename Use>
void for_breakers(const Sampling & sampling, int32_t token, Use use) {
    if (!sampling.dry_breakers) return;
    const auto & [tails, heads] = *sampling.dry_breakers;
    for (auto it = std::lower_bound(heads.begin(), heads.end(), std::pair(token, 0u)); it != heads.end(); ++it) {
        if (it->first != token) return;
        use(tails[it->second]);
    }
}

// The number of tokens after the text's last sequence breaker; the length of the text if there is none.
size_t since_breaker(const Sampling & sampling, const Text & text) {
    const auto from_end = [&text](size_t i) { return text.tokens[text.n - 1 - i]; };
    for (size_t i = 0; i < text.n; i++) {
        size_t longest = 0;
        bool found = false;
        for_breakers(sampling, from_end(i), [&](const std::vector<int32_t> & tail) {
            bool matches = tail.size() <= i;
            for (size_t j = 0; matches && j < tail.size(); j++) matches = tail[j] == from_end(i - j - 1);
            if (matches) longest = std::max(longest, tail.size());
            found = found || matches;
        });
        if (found) return i - longest;
    }
    return text.n;
}

// Finds, for each token that would continue a repetition, the length of that repetition. Returns false if there is none.
// "Don't repeat yourself", by p-e-w: https://github.com/oobabooga/text-generation-webui/pull/5677
bool repetitions_of(const Sampling & sampling, const Text & whole, Counts & longest) {
    const Text text = last(whole, sampling.dry_last_n);
    const int64_t n = static_cast<int64_t>(text.n), allowed = sampling.dry_allowed_length;
    if (n <= allowed) return false;
    const int64_t limit = static_cast<int64_t>(since_breaker(sampling, text));
    if (limit < allowed) return false;
    const auto from_end = [&text](int64_t i) { return text.tokens[text.n - 1 - i]; };
    // The Z-algorithm on the reversed text: repeated[k] is the number of last tokens that also occur k tokens earlier.
    std::vector<int64_t> repeated(n, 0);
    int64_t left = 0, right = 0;  // the last repetition found covers [left, right)
    for (int64_t k = 1; k < n; k++) {
        int64_t length = k < right ? std::min(right - k, repeated[k - left]) : 0;
        while (k + length < n && from_end(length) == from_end(k + length)) length++;
        repeated[k] = length;
        if (k + length > right) left = k, right = k + length;
        const int64_t counted = std::min(length, limit);
        if (counted < allowed) continue;
        auto & known = longest[from_end(k - 1)];
        known = std::max(known, static_cast<int32_t>(counted));
    }
    return true;
}

// The logit of a token that occurs n times in the window, or continues a repetition of n tokens.
float adjusted(Sampler sampler, const Sampling & sampling, int32_t token, int32_t n, float logit) {
    if (sampler == Sampler::penalties) {
        logit = logit <= 0 ? logit * sampling.repeat_penalty : logit / sampling.repeat_penalty;
        return logit - (static_cast<float>(n) * sampling.frequency_penalty + sampling.presence_penalty);
    }
    bool breaks = false;
    for_breakers(sampling, token, [&breaks](const std::vector<int32_t> & tail) { breaks = breaks || tail.empty(); });
    if (breaks) return logit;
    int exponent = n - static_cast<int>(sampling.dry_allowed_length);
    if (sampling.dry_base > 1.000001f) {
        constexpr float kLogOfLargest = 88.7228391f;  // ln FLT_MAX: the power must not overflow
        const int largest = static_cast<int>(kLogOfLargest / std::log(sampling.dry_base));
        if (largest > 0) exponent = std::min(exponent, largest);
    }
    const double penalty = sampling.dry_multiplier * std::pow(static_cast<double>(sampling.dry_base), exponent);
    return logit - static_cast<float>(std::min<double>(penalty, FLT_MAX / 4));  // finite: infinity would ban the token
}

// Returns false if the sampler changes nothing, not even the order.
bool count(Sampler sampler, const Sampling & sampling, const Text & text, Counts & counts) {
    if (sampler == Sampler::dry) return repetitions_of(sampling, text, counts);
    counts = counts_of(sampling, text);
    return true;
}

}  // namespace

void penalize(Sampler sampler, const Sampling & sampling, const Text & text, Candidates & candidates) {
    Counts counts;
    if (!count(sampler, sampling, text, counts)) return;
    for (auto & [token, logit, prob] : candidates.list) {
        const auto found = counts.find(token);
        if (found != counts.end()) logit = adjusted(sampler, sampling, token, found->second, logit);
    }
    candidates.sorted = false;
}

void apply_to_row(Sampler sampler, const Sampling & sampling, const Text & text, float * logits, size_t n_vocab) {
    Counts counts;
    count(sampler, sampling, text, counts);
    for (const auto & [token, n] : counts) {
        if (token < 0 || static_cast<size_t>(token) >= n_vocab) continue;
        logits[token] = adjusted(sampler, sampling, token, n, logits[token]);
    }
}

}  // namespace ggufspec
