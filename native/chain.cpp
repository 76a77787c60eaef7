#include "chain.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <numeric>
#include <utility>

#include "kernels.h"
#include "penalties.h"

namespace ggufspec {
namespace {

bool more_likely(const Candidate & a, const Candidate & b) { return a.logit > b.logit; }

// Puts the n largest candidates into `sorted`, in descending order. Equal logits come in llama.cpp's order: it sorts up to
// 128 candidates in place, and more through 128 buckets between the logits -10 and 10.
void sort_by_buckets(const std::vector<Candidate> & list, size_t n, std::vector<Candidate> & sorted) {
    constexpr int kBuckets = 128;
    constexpr float kScale = kBuckets / 20.0f;
    const auto bucket_of = [](const Candidate & candidate) {
        const float at = kScale * candidate.logit + 10.0f * kScale;
        return at >= kBuckets - 1 ? kBuckets - 1 : at >= 0 ? static_cast<int>(at) : 0;
    };
    std::vector<std::vector<Candidate>> buckets(kBuckets);
    for (const Candidate & candidate : list) buckets[bucket_of(candidate)].push_back(candidate);
    sorted.clear();
    for (int i = kBuckets - 1; i >= 0 && sorted.size() < n; i--) {
        auto & bucket = buckets[i];
        if (sorted.size() + bucket.size() < n) {
            std::sort(bucket.begin(), bucket.end(), more_likely);
        } else {
            std::partial_sort(bucket.begin(), bucket.begin() + (n - sorted.size()), bucket.end(), more_likely);
        }
        sorted.insert(sorted.end(), bucket.begin(), bucket.end());
    }
}

void keep_first(Candidates & candidates, size_t n) {
    auto & list = candidates.list;
    if (n < list.size() && n > 0 && candidates.sorted) candidates.ends_in_tie = list[n - 1].logit == list[n].logit;
    list.resize(std::min(n, list.size()));
}

// Keeps the n largest candidates, in descending order.
void sort_largest(Candidates & candidates, size_t n) {
    auto & list = candidates.list;
    if (n <= 128) {
        std::partial_sort(list.begin(), list.begin() + n, list.end(), more_likely);
        list.resize(n);
    } else {
        std::vector<Candidate> sorted;
        sort_by_buckets(list, n, sorted);
        sorted.resize(n);
        list = std::move(sorted);
    }
    candidates.sorted = true;
}

void softmax(Candidates & candidates, bool sort, float temperature = 1) {
    auto & list = candidates.list;
    if (sort && !candidates.sorted) sort_largest(candidates, list.size());
    float largest = list[0].logit;
    if (!candidates.sorted) {
        for (const Candidate & candidate : list) largest = std::max(largest, candidate.logit);
    }
    float sum = 0;
    for (Candidate & candidate : list) sum += candidate.prob = std::exp((candidate.logit - largest) / temperature);
    for (Candidate & candidate : list) candidate.prob /= sum;
}

void top_k(const Sampling & sampling, Candidates & candidates) {
    const size_t n = std::min<size_t>(sampling.top_k, candidates.list.size());
    if (candidates.sorted) return keep_first(candidates, n);
    sort_largest(candidates, n);
}

void top_p(const Sampling & sampling, Candidates & candidates) {
    softmax(candidates, false);
    auto & list = candidates.list;
    std::vector<Candidate> few;
    if (!candidates.sorted && list.size() > 1024) {
        constexpr size_t kFew = 256;  // usually enough
        sort_by_buckets(list, kFew, few);
        few.resize(kFew);
    } else if (!candidates.sorted) {
        sort_largest(candidates, list.size());
    }
    float sum = 0;
    size_t n = 0;
    for (; n < few.size() && sum < sampling.top_p; n++) sum += few[n].prob;
    if (!few.empty() && sum >= sampling.top_p) {
        list = std::move(few);
    } else if (!few.empty()) {
        sort_by_buckets(list, list.size(), few);
        list = std::move(few);
        sum = 0;
        n = 0;
    }
    for (; n < list.size() && sum < sampling.top_p; n++) sum += list[n].prob;
    candidates.sorted = true;
    keep_first(candidates, n);
}

void min_p(const Sampling & sampling, Candidates & candidates) {
    auto & list = candidates.list;
    const auto least = [&sampling](float largest) { return largest + std::log(sampling.min_p); };
    if (!candidates.sorted) {
        float largest = -FLT_MAX;
        for (const Candidate & candidate : list) largest = std::max(largest, candidate.logit);
        const float bound = least(largest);
        const auto kept = std::remove_if(list.begin(), list.end(), [bound](const Candidate & c) { return !(c.logit >= bound); });
        if (kept != list.begin()) {
            list.erase(kept, list.end());
            return;
        }
        sort_largest(candidates, list.size());
    }
    const float bound = least(list[0].logit);
    size_t n = 1;
    while (n < list.size() && !(list[n].logit < bound)) n++;
    keep_first(candidates, n);
}

// Meister et al., https://arxiv.org/abs/2202.00666
void typical_p(const Sampling & sampling, Candidates & candidates) {
    softmax(candidates, true);
    const auto & list = candidates.list;
    float entropy = 0;
    for (const Candidate & candidate : list) {
        // llama.cpp lacks this condition: a banned token makes its entropy NaN, and its selection arbitrary.
        if (candidate.prob > 0) entropy += -candidate.prob * std::log(candidate.prob);
    }
    std::vector<float> distance;
    for (const Candidate & candidate : list) {
        const float found = std::fabs(-std::log(candidate.prob) - entropy);
        distance.push_back(std::isnan(found) ? FLT_MAX : found);  // of infinite logits; a NaN has no place in an order
    }
    candidates.cut_a_tie |= std::exchange(candidates.ends_in_tie, false);
    std::vector<size_t> order(list.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(), [&distance](size_t a, size_t b) { return distance[a] < distance[b]; });
    std::vector<Candidate> kept;
    float sum = 0;
    for (size_t at : order) {
        kept.push_back(list[at]);
        sum += list[at].prob;
        if (sum > sampling.typical_p) break;
    }
    if (kept.size() < list.size() && distance[order[kept.size() - 1]] == distance[order[kept.size()]])
        candidates.cut_a_tie = true;
    candidates.list = std::move(kept);
    candidates.sorted = false;
}

// https://arxiv.org/abs/2411.07641
void top_n_sigma(const Sampling & sampling, Candidates & candidates) {
    auto & list = candidates.list;
    if (list.size() <= 1) return;
    float largest = list[0].logit, sum = 0;
    size_t n = 0;
    for (const Candidate & candidate : list) {
        if (candidate.logit == kNever) continue;
        largest = std::max(largest, candidate.logit);
        sum += candidate.logit;
        n++;
    }
    const float mean = n > 0 ? sum / n : 0;
    float squares = 0;
    for (const Candidate & candidate : list) {
        if (candidate.logit != kNever) squares += static_cast<double>(candidate.logit - mean) * (candidate.logit - mean);
    }
    const float deviation = n > 0 ? std::sqrt(squares / n) : 0;
    const float bound = largest - sampling.top_n_sigma * deviation;
    for (Candidate & candidate : list) {
        if (candidate.logit < bound) candidate.logit = kNever;
    }
}

// As many candidates as keep the surprise near tau, if probabilities fall by a power law.
// Basu et al., https://arxiv.org/abs/2007.14966
void mirostat_1(const Sampling & sampling, const State & state, Candidates & candidates) {
    softmax(candidates, true, sampling.temperature);
    keep_first(candidates, mirostat_k(state, candidates.n_vocab, candidates.list));
}

// The candidates with a surprise of at most mu.
void mirostat_2(const Sampling & sampling, const State & state, Candidates & candidates) {
    softmax(candidates, true, sampling.temperature);
    const auto & list = candidates.list;
    size_t n = 0;
    while (n < list.size() && !(-std::log2(list[n].prob) > state.mu)) n++;
    keep_first(candidates, std::max<size_t>(n, 1));
}

// Prefers tokens whose probability is close to a target, which makes up for the tokens before.
// Source: https://github.com/ggml-org/llama.cpp/pull/17927
void adaptive_p(const Sampling & sampling, const State & state, Candidates & candidates) {
    constexpr float kWidth = 0.3f, kPeak = 5, kSharpness = 10;
    softmax(candidates, false);
    const float target = std::min(sampling.adaptive_target, 1.0f);
    const float adapted = std::clamp(2 * target - state.weighted_sum / state.total_weight, 0.0f, 1.0f);
    for (Candidate & candidate : candidates.list) {
        const float distance = std::abs((candidate.prob - adapted) * (1 / kWidth));
        // The row keeps the logits before, so the new ones take the place of the probabilities.
        candidate.prob = candidate.logit == kNever ? kNever : kPeak - kSharpness * distance * distance / (1 + distance);
    }
}

double entropy_of(const Candidates & candidates) {
    double entropy = 0;
    for (const Candidate & candidate : candidates.list) {
        if (candidate.prob > 0) entropy -= candidate.prob * std::log(candidate.prob);
    }
    return entropy;
}

void temperature(const Sampling & sampling, Candidates & candidates) {
    auto & list = candidates.list;
    if (!sampling.is_greedy()) {
        float used = sampling.temperature;
        if (sampling.is_dynamic()) {
            softmax(candidates, true);  // as llama.cpp does: its order of equal logits matters to later samplers
            const auto is_possible = [](const Candidate & candidate) { return candidate.logit > kNever; };
            const size_t n = std::count_if(list.begin(), list.end(), is_possible);
            used = std::max(sampling.temperature_at(entropy_of(candidates), n), kColdest);
        }
        for (Candidate & candidate : list) candidate.logit /= used;
        return;
    }
    size_t best = 0;
    for (size_t i = 1; i < list.size(); i++) {
        if (list[i].logit > list[best].logit) best = i;
    }
    for (size_t i = 0; i < list.size(); i++) {
        if (i == best) continue;
        if (list[i].logit == list[best].logit) candidates.cut_a_tie = true;
        list[i].logit = kNever;
    }
}

}  // namespace

// Steele et al., https://doi.org/10.1145/2660193.2660195
uint64_t mixed(uint64_t bits) {
    bits += 0x9e3779b97f4a7c15;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
    return bits ^ (bits >> 31);
}

bool Sampling::is_active(Sampler sampler) const {
    switch (sampler) {
        case Sampler::penalties:
            return penalty_last_n != 0 && (repeat_penalty != 1 || frequency_penalty != 0 || presence_penalty != 0);
        case Sampler::dry:
            return dry_multiplier != 0 && dry_base >= 1 && dry_last_n != 0;
        case Sampler::top_n_sigma:
            return top_n_sigma > 0;
        case Sampler::top_k:
            return top_k > 0;
        case Sampler::typical_p:
            return typical_p < 1;
        case Sampler::top_p:
            return top_p < 1;
        case Sampler::min_p:
            return min_p > 0;
        case Sampler::xtc:
            return xtc_probability > 0 && xtc_threshold <= 0.5f && !is_greedy();
        case Sampler::mirostat:
            return mirostat > 0 && !is_greedy();
        case Sampler::adaptive_p:
            return adaptive_target >= 0 && !is_greedy();
        case Sampler::temperature:
            return temperature != 1 || is_dynamic();
    }
    return false;
}

State Sampling::first_state() const {
    const float weight = 1 / (1 - adaptive_decay);
    return {2 * mirostat_tau, adaptive_target * weight, weight};
}

State Sampling::next_state(State state, float observed) const {
    if (!(observed > 0)) return state;  // cannot be drawn
    state.mu -= mirostat_eta * (-std::log2(observed) - mirostat_tau);
    state.weighted_sum = observed + adaptive_decay * state.weighted_sum;
    state.total_weight = 1 + adaptive_decay * state.total_weight;
    state.n_tokens++;
    return state;
}

double Sampling::coin(const State & state_before) const {
    const uint64_t seed = state ? state->seed : 0;
    return static_cast<double>(mixed(seed + mixed(state_before.n_tokens)) >> 11) * 0x1p-53;
}

float Sampling::temperature_at(double entropy, size_t n) const {
    if (n <= 1) return temperature;
    const float least = std::max(temperature - dynatemp_range, 0.0f), most = temperature + dynatemp_range;
    const float share = static_cast<float>(std::max(entropy, 0.0)) / std::log(static_cast<float>(n));
    return least + (most - least) * std::pow(share, dynatemp_exponent);
}

int64_t Sampling::window() const {
    int64_t most = 0;
    for (Sampler sampler : order) {
        if (!is_active(sampler)) continue;
        const int64_t n = sampler == Sampler::penalties ? penalty_last_n : sampler == Sampler::dry ? dry_last_n : 0;
        if (n < 0) return -1;
        most = std::max(most, n);
    }
    return most;
}

void apply(Sampler sampler, const Sampling & sampling, const Text & text, Candidates & candidates) {
    if (!sampling.is_active(sampler) || candidates.list.empty()) return;
    switch (sampler) {
        case Sampler::penalties:
        case Sampler::dry:
            return penalize(sampler, sampling, text, candidates);
        case Sampler::top_n_sigma:
            return top_n_sigma(sampling, candidates);
        case Sampler::top_k:
            return top_k(sampling, candidates);
        case Sampler::typical_p:
            return typical_p(sampling, candidates);
        case Sampler::top_p:
            return top_p(sampling, candidates);
        case Sampler::min_p:
            return min_p(sampling, candidates);
        case Sampler::mirostat:
            return (sampling.mirostat == 1 ? mirostat_1 : mirostat_2)(sampling, text.state, candidates);
        case Sampler::adaptive_p:
            return adaptive_p(sampling, text.state, candidates);
        case Sampler::temperature:
            return temperature(sampling, candidates);
        case Sampler::xtc:
            return;
    }
}

bool exclude_top(const Sampling & sampling, Candidates & candidates, Candidates & others) {
    if (!sampling.is_active(Sampler::xtc) || candidates.list.size() < 2) return false;
    softmax(candidates, true);
    const auto & list = candidates.list;
    size_t n = 0;
    while (n < list.size() && list[n].logit > kNever && list[n].prob >= sampling.xtc_threshold) n++;
    if (n < 2) return false;
    if (list[n - 2].logit == list[n - 1].logit) candidates.cut_a_tie = true;
    others = candidates;
    others.list.erase(others.list.begin(), others.list.begin() + (n - 1));
    return true;
}

size_t mirostat_k(const State & state, size_t n_vocab, const std::vector<Candidate> & list) {
    constexpr size_t kMost = 100;
    float products = 0, squares = 0;
    for (size_t i = 0; i + 1 < std::min(kMost, list.size()); i++) {
        const float t = std::log(static_cast<float>(i + 2) / static_cast<float>(i + 1));
        products += t * std::log(list[i].prob / list[i + 1].prob);
        squares += t * t;
    }
    const float exponent = products / squares, epsilon = exponent - 1;
    const float k = std::pow(epsilon * std::exp2(state.mu) / (1 - std::pow(static_cast<float>(n_vocab), -epsilon)), 1 / exponent);
    // llama.cpp converts k to an int: where that overflows, its result is undefined.
    return !(k >= 1) ? 1 : k >= static_cast<float>(n_vocab) ? n_vocab : static_cast<size_t>(k);
}

}  // namespace ggufspec
