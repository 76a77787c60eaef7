#include "sampling.h"

#include <algorithm>
#include <bitset>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "large.h"
#include "penalties.h"

namespace ggufspec {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;
constexpr size_t kBlock = 1024;    // tokens per block; a draw reads the sums of blocks first
constexpr size_t kMostFast = 128;  // llama.cpp sorts up to this many candidates in place
constexpr size_t kMostListed = 1024;  // up to this many allowed tokens, a list is faster than a masked row

void all_of(const float * row, size_t n_vocab, Candidates & candidates) {
    candidates = {};
    candidates.n_vocab = n_vocab;
    candidates.list.resize(n_vocab);
    for (size_t i = 0; i < n_vocab; i++) {
        candidates.list[i] = {static_cast<int32_t>(i), std::isnan(row[i]) ? kNever : row[i], 0};
    }
}

// The bits of word i of a mask that stand for tokens of the vocabulary.
uint32_t in_vocab(size_t i, size_t n_vocab) {
    return n_vocab - 32 * i >= 32 ? ~uint32_t{0} : (uint32_t{1} << (n_vocab - 32 * i)) - 1;
}

void allowed_of(const float * row, size_t n_vocab, const Mask & mask, Candidates & candidates) {
    candidates = {};
    candidates.n_vocab = n_vocab;
    for (size_t i = 0; i < mask.n_words && 32 * i < n_vocab; i++) {
        for (uint32_t bits = mask.words[i] & in_vocab(i, n_vocab); bits; bits &= bits - 1) {
            const size_t token = 32 * i + std::bitset<32>(~bits & (bits - 1)).count();
            if (row[token] > kNever) candidates.list.push_back({static_cast<int32_t>(token), row[token], 0});
        }
    }
}

bool by_token(const Candidate & a, const Candidate & b) { return a.token < b.token; }

bool by_logit(const Candidate & a, const Candidate & b) { return a.logit != b.logit ? a.logit > b.logit : a.token < b.token; }

void note_ties(Candidates & candidates) {
    const auto & list = candidates.list;
    const auto equal = [](const Candidate & a, const Candidate & b) { return a.logit == b.logit; };
    candidates.has_ties = std::adjacent_find(list.begin(), list.end(), equal) != list.end();
}

// The k largest logits, in descending order.
void select_largest(Large & large, size_t k, Candidates & candidates) {
    auto & list = candidates.list;
    large.gather(large.reached_by(k), list);
    std::partial_sort(list.begin(), list.begin() + std::min(k + 1, list.size()), list.end(), by_logit);
    candidates.sorted = true;
    candidates.cut_a_tie = false;
    candidates.ends_in_tie = list.size() > k && list[k - 1].logit == list[k].logit;
    list.resize(std::min(k, list.size()));
    note_ties(candidates);
}

void drop_impossible(std::vector<Candidate> & list) {
    const auto impossible = [](const Candidate & candidate) { return !(candidate.logit > kNever); };  // NaN too
    list.erase(std::remove_if(list.begin(), list.end(), impossible), list.end());
}

// Calls add(token, bias) for each bias and each banned token.
template <typename Add>
void each_bias(const Sampling & sampling, const Text & text, const Add & add) {
    for (const auto & [token, bias] : sampling.logit_bias) add(token, bias);
    for (size_t i = 0; text.banned && i < text.banned->size(); i++) add((*text.banned)[i], kNever);
}

// `list` is sorted by token.
void add_biases(const Sampling & sampling, const Text & text, std::vector<Candidate> & list) {
    each_bias(sampling, text, [&list](int32_t token, float bias) {
        const auto found = std::lower_bound(list.begin(), list.end(), Candidate{token, 0, 0}, by_token);
        if (found != list.end() && found->token == token) found->logit += bias;
    });
    drop_impossible(list);
}

// Candidates that the samplers leave, with this probability.
struct Branch {
    double weight = 1;
    Candidates candidates;
};

// A row of logits, and the samplers to apply to it.
struct Job {
    const float * row;
    size_t n_vocab;
    const Sampling & sampling;
    const std::vector<Sampler> & samplers;  // the active ones, at least one
    const Text & text;
    bool is_greedy;  // the most likely remaining token is taken

    bool starts_fast() const { return starts_with_top_k() || samplers[0] == Sampler::min_p || samplers[0] == Sampler::mirostat; }

    bool starts_with_top_k() const {
        return samplers[0] == Sampler::top_k && static_cast<size_t>(sampling.top_k) <= std::min(kMostFast, n_vocab);
    }
};

// xtc draws whether it removes tokens: the distribution is a mixture of what both branches make of the tokens.
void apply_from(size_t next, const Job & job, std::vector<Branch> & branches) {
    const float p = job.sampling.xtc_probability;
    for (; next < job.samplers.size(); next++) {
        for (size_t i = 0, n = branches.size(); i < n; i++) {
            Branch others{branches[i].weight * p, {}};
            if (job.samplers[next] != Sampler::xtc) {
                apply(job.samplers[next], job.sampling, job.text, branches[i].candidates);
            } else if (exclude_top(job.sampling, branches[i].candidates, others.candidates)) {
                branches[i].weight *= 1 - p;
                branches.push_back(std::move(others));
            }
        }
    }
}

// Applies the first sampler in one pass over the row.
void first_fast(const Job & job, Large & large, Candidates & candidates) {
    candidates.sorted = candidates.has_ties = candidates.cut_a_tie = candidates.ends_in_tie = false;
    candidates.n_vocab = job.n_vocab;
    const Sampling & sampling = job.sampling;
    if (job.starts_with_top_k()) return select_largest(large, sampling.top_k, candidates);
    float bound = std::log(sampling.min_p);
    if (job.samplers[0] == Sampler::mirostat) {
        const Softmax softmax{job.row, large.largest(), kLog2E / sampling.temperature, 1.0f};
        const double sum = kernels.weight_of(softmax, 0, job.n_vocab);
        if (sampling.mirostat == 1) {
            select_largest(large, std::min<size_t>(100, job.n_vocab), candidates);
            const auto weight = [&](float logit) { return std::exp((logit - large.largest()) / sampling.temperature); };
            for (Candidate & each : candidates.list) each.prob = static_cast<float>(weight(each.logit) / sum);
            return select_largest(large, mirostat_k(job.text.state, job.n_vocab, candidates.list), candidates);
        }
        bound = static_cast<float>((std::log2(sum) - job.text.state.mu) / softmax.rate);
    }
    large.gather(large.largest() + std::min(bound, 0.0f), candidates.list);
    std::sort(candidates.list.begin(), candidates.list.end(), by_token);
    candidates.cut_a_tie = bound > 0;  // mirostat keeps only one
}

// Runs the samplers over the row; with a shortcut if `large` is given.
void truncate(const Job & job, Large * large, std::vector<Branch> & branches) {
    branches.resize(1);
    branches[0].weight = 1;
    large ? first_fast(job, *large, branches[0].candidates) : all_of(job.row, job.n_vocab, branches[0].candidates);
    apply_from(large ? 1 : 0, job, branches);
}

double sum_of(const float * values, size_t n) {
    float lanes[16] = {};
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        for (size_t lane = 0; lane < 16; lane++) lanes[lane] += values[i + lane];
    }
    double sum = std::accumulate(lanes, lanes + 16, 0.0);
    for (; i < n; i++) sum += values[i];
    return sum;
}

// The index at which the cumulative weight first exceeds uniform * total; if rounding prevents that, the last with a weight.
template <typename Weight>
size_t index_at(double goal, size_t n, const Weight & weight) {
    double sum = 0;
    size_t last = n;
    for (size_t i = 0; i < n; i++) {
        const double w = weight(i);
        if (w <= 0) continue;
        last = i;
        sum += w;
        if (sum > goal) break;
    }
    return last;
}

// A draw from weights: sums[i] is the sum of block i, fill(begin, end, weights) computes weights in a block. Returns -1 if
// the sum is due to rounding, and no weight is above 0.
template <typename Fill>
int32_t pick_block(const std::vector<double> & sums, size_t n_vocab, double uniform, const Fill & fill) {
    float weights[kBlock];
    double goal = uniform * std::accumulate(sums.begin(), sums.end(), 0.0);
    size_t block = index_at(goal, sums.size(), [&sums](size_t i) { return sums[i]; });
    if (block == sums.size()) return -1;
    for (size_t i = 0; i < block; i++) goal -= sums[i];
    const size_t begin = block * kBlock, end = std::min(n_vocab, begin + kBlock);
    fill(begin, end, weights);
    const size_t index = index_at(goal, end - begin, [&weights](size_t i) { return weights[i]; });
    return index < end - begin ? static_cast<int32_t>(begin + index) : -1;
}

// Whether truncation by the sampler never removes the largest logit.
bool keeps_largest(Sampler sampler) {
    return sampler == Sampler::top_k || sampler == Sampler::top_p || sampler == Sampler::min_p || sampler == Sampler::top_n_sigma;
}

}  // namespace

void Mask::apply(float * row, size_t n_vocab) const {
    for (size_t begin = 0; begin < n_vocab; begin += 32) {
        const uint32_t word = begin / 32 < n_words ? words[begin / 32] : 0;
        if (word == ~uint32_t{0}) continue;
        for (size_t i = begin; i < std::min(n_vocab, begin + 32); i++) {
            if (!(word >> (i - begin) & 1)) row[i] = kNever;
        }
    }
}

size_t Mask::n_allowed(size_t n_vocab) const {
    size_t n = 0;
    for (size_t i = 0; i < n_words && 32 * i < n_vocab; i++) n += std::bitset<32>(words[i] & in_vocab(i, n_vocab)).count();
    return n;
}

bool Row::set(const float * logits, size_t n_vocab, const Sampling & sampling, const Text & text, const Mask * mask, bool keep) {
    thread_local std::vector<Sampler> samplers;
    thread_local std::vector<Branch> branches;
    thread_local Large large;
    samplers.clear();
    for (Sampler sampler : sampling.order) {
        if (sampling.is_active(sampler)) samplers.push_back(sampler);
    }
    const bool ends_tempered = !samplers.empty() && samplers.back() == Sampler::temperature, is_greedy = sampling.is_greedy();
    if (ends_tempered) samplers.pop_back();
    const auto finish_list = [&] {
        thread_local Row other;
        for (Branch & branch : branches) {
            const bool is_first = &branch == branches.data();
            Row & row = is_first ? *this : other;
            if (!row.set_branch(branch.candidates)) return false;
            row.temper(sampling, ends_tempered);
            if (sampling.adapts()) row.set_adapted(branch.candidates);
            if (branches.size() > 1) row.scale(branch.weight);
            if (branches.size() > 1 && sampling.adapts()) cases_.push_back({row.tokens_, row.probs_, row.logits_});
            if (!is_first) add(other);
        }
        if (branches.size() > 1) set_logits(ends_tempered ? sampling.temperature : 1);
        return true;
    };
    const auto changes_few = [](Sampler sampler) { return sampler == Sampler::penalties || sampler == Sampler::dry; };
    const auto truncation = std::find_if_not(samplers.begin(), samplers.end(), changes_few);

    n_vocab_ = n_vocab;
    row_ = logits;
    cases_.clear();
    if (mask) {
        const size_t n_allowed = mask->n_allowed(n_vocab);
        if (n_allowed == 0) return false;
        // A list of the allowed tokens is short, so it needs no shortcuts.
        const Job job{logits, n_vocab, sampling, samplers, text, is_greedy};
        if (n_allowed <= kMostListed ||
            (truncation != samplers.end() && (truncation != samplers.begin() || !job.starts_fast()))) {
            branches.resize(1);
            branches[0].weight = 1;
            allowed_of(logits, n_vocab, *mask, branches[0].candidates);
            add_biases(sampling, text, branches[0].candidates.list);
            if (n_allowed > 1) apply_from(0, job, branches);
            return finish_list();
        }
    }
    if (mask || !sampling.logit_bias.empty() || text.banned || truncation != samplers.begin()) {
        own_.assign(logits, logits + n_vocab);
        if (mask) mask->apply(own_.data(), n_vocab);
        each_bias(sampling, text, [this](int32_t token, float bias) { own_[token] += bias; });
        for (auto it = samplers.begin(); it != truncation; ++it) apply_to_row(*it, sampling, text, own_.data(), n_vocab);
        row_ = own_.data();
    }
    samplers.erase(samplers.begin(), truncation);
    if (is_greedy && !keep && std::all_of(samplers.begin(), samplers.end(), keeps_largest)) {
        // Greedy: without a tie, only the largest logit is needed. Rows to keep may get another temperature later.
        largest_ = kernels.largest_of(row_, n_vocab);
        if (!std::isfinite(largest_)) return false;
        likeliest_ = kernels.only_index_of(row_, n_vocab, largest_);
        is_list_ = false;
        is_certain_ = true;
        if (likeliest_ >= 0) return true;
    }
    if (samplers.size() == 1 && samplers[0] == Sampler::xtc && !(ends_tempered && sampling.is_dynamic()) &&
        set_lowered(sampling, ends_tempered ? sampling.temperature : 1, keep && row_ == logits)) {
        return true;
    }
    const Job job{row_, n_vocab, sampling, samplers, text, is_greedy};
    const bool is_fast = !samplers.empty() && job.starts_fast();
    if (is_fast) large.read(row_, n_vocab);
    largest_ = is_fast ? large.largest() : kernels.largest_of(row_, n_vocab);
    if (!std::isfinite(largest_)) return false;

    if (!samplers.empty()) {
        const auto depends_on_order = [](Sampler sampler) {
            return sampler == Sampler::penalties || sampler == Sampler::dry || sampler == Sampler::typical_p;
        };
        const auto ties_matter = [&](const Branch & branch) {
            const Candidates & found = branch.candidates;
            if (found.cut_a_tie || found.ends_in_tie) return true;
            return found.has_ties && (job.is_greedy || std::any_of(samplers.begin(), samplers.end(), depends_on_order));
        };
        truncate(job, is_fast ? &large : nullptr, branches);
        if (is_fast && std::any_of(branches.begin(), branches.end(), ties_matter)) truncate(job, nullptr, branches);
        return finish_list();
    }
    is_list_ = false;
    if (keep && row_ == logits) keep_row(logits);
    likeliest_ = -1;  // searched for when needed
    temper(sampling, ends_tempered);
    return true;
}

// The mixture that xtc makes of a softmax is one of the same temperature: removed tokens have smaller logits.
bool Row::set_lowered(const Sampling & sampling, float temperature, bool keep) {
    thread_local Large large;
    thread_local std::vector<Candidate> above;
    large.read(row_, n_vocab_);
    largest_ = large.largest();
    if (!std::isfinite(largest_) || !(sampling.xtc_threshold > 0)) return false;
    const Softmax before{row_, largest_, kLog2E, 1.0f};
    set_rate(kLog2E / temperature);
    is_list_ = is_certain_ = false;
    const double sum = temperature == 1 ? 1 / softmax_.scale : kernels.weight_of(before, 0, n_vocab_);
    large.gather(largest_ + std::log(sampling.xtc_threshold * static_cast<float>(sum)), above);
    std::sort(above.begin(), above.end(), by_logit);
    double removed = 0;
    for (size_t i = 0; i + 1 < above.size(); i++) removed += of(above[i].token);
    if (removed > 0.99) return false;  // too little is left to know how much
    if (above.size() > 1 && above[above.size() - 2].logit == above.back().logit) return false;  // an order decides
    likeliest_ = -1;
    if (above.size() > 1 ? row_ != own_.data() : keep) keep_row(row_);
    if (above.size() < 2) return true;
    const double p = sampling.xtc_probability;
    const float shift = temperature * static_cast<float>(std::log((1 - p) / (1 - p + p / (1 - removed))));
    largest_ = std::max(largest_ + shift, above.back().logit);
    above.pop_back();
    for (const Candidate & each : above) own_[each.token] += shift;
    for (const Candidate & each : above) {
        const size_t block = each.token / kBlock;
        blocks_[block] = kernels.weight_of(softmax_, block * kBlock, std::min(n_vocab_, (block + 1) * kBlock));
    }
    normalize();
    return true;
}

bool Row::set_branch(Candidates & candidates) {
    is_list_ = true;
    set_list(candidates);
    return !tokens_.empty() && std::isfinite(largest_);
}

void Row::temper(const Sampling & sampling, bool ends_tempered) {
    if (sampling.is_greedy() || !ends_tempered) return set_temperature(sampling.is_greedy() ? 0 : 1);
    set_temperature(sampling.is_dynamic() ? std::max(dynamic_temperature(sampling), kColdest) : sampling.temperature);
}

float Row::dynamic_temperature(const Sampling & sampling) const {
    const size_t n = is_list_ ? logits_.size() : n_vocab_;
    const Softmax softmax{is_list_ ? logits_.data() : row_, largest_, kLog2E, 1.0f};
    Moments all{};
    for (size_t begin = 0; begin < n; begin += kBlock) {
        const Moments found = kernels.moments_of(softmax, begin, std::min(n, begin + kBlock));
        all = {all.weight + found.weight, all.excess + found.excess, all.n + found.n};
    }
    return sampling.temperature_at(std::log(all.weight) + all.excess / all.weight, all.n);
}

float Row::observed(const Sampling & sampling, int32_t token, double coin) const {
    if (!sampling.adapts() || !(of(token) > 0)) return of(token);
    const auto index_in = [token](const std::vector<int32_t> & tokens) -> size_t {
        const auto found = std::lower_bound(tokens.begin(), tokens.end(), token);
        return found != tokens.end() && *found == token ? found - tokens.begin() : tokens.size();
    };
    const std::vector<int32_t> * tokens = &tokens_;
    const std::vector<float> * logits = &logits_;
    double goal = coin * of(token);
    for (const Case & each : cases_) {
        const size_t i = index_in(each.tokens);
        if (i == each.tokens.size() || !(each.probs[i] > 0)) continue;
        tokens = &each.tokens;
        logits = &each.logits;
        if ((goal -= each.probs[i]) < 0) break;
    }
    const float largest = *std::max_element(logits->begin(), logits->end());
    double sum = 0;
    for (float logit : *logits) sum += std::exp(logit - largest);
    return static_cast<float>(std::exp((*logits)[index_in(*tokens)] - largest) / sum);
}

void Row::set_adapted(const Candidates & candidates) {
    const auto & list = candidates.list;
    float largest = kNever;
    double sum = 0;
    for (const Candidate & candidate : list) largest = std::max(largest, candidate.prob);
    for (size_t i = 0; i < list.size(); i++) sum += probs_[i] = std::exp(list[i].prob - largest);
    for (float & prob : probs_) prob = static_cast<float>(prob / sum);
}

void Row::scale(double weight) {
    for (float & prob : probs_) prob = static_cast<float>(weight * prob);
}

void Row::add(const Row & other) {
    std::vector<int32_t> tokens;
    std::vector<float> probs;
    for (size_t i = 0, j = 0; i < tokens_.size() || j < other.tokens_.size();) {
        const bool is_here = i < tokens_.size() && (j == other.tokens_.size() || tokens_[i] <= other.tokens_[j]);
        const bool is_there = j < other.tokens_.size() && (i == tokens_.size() || other.tokens_[j] <= tokens_[i]);
        tokens.push_back(is_here ? tokens_[i] : other.tokens_[j]);
        probs.push_back((is_here ? probs_[i++] : 0) + (is_there ? other.probs_[j++] : 0));
    }
    tokens_ = std::move(tokens);
    probs_ = std::move(probs);
}

void Row::set_logits(float temperature) {
    logits_.clear();
    for (float prob : probs_) logits_.push_back(temperature * std::log(prob));
    const size_t likeliest = std::max_element(logits_.begin(), logits_.end()) - logits_.begin();
    largest_ = logits_[likeliest];
    likeliest_ = tokens_[likeliest];
}

void Row::set_list(Candidates & candidates) {
    auto & list = candidates.list;
    drop_impossible(list);
    const auto likeliest =
        std::max_element(list.begin(), list.end(), [](const auto & a, const auto & b) { return a.logit < b.logit; });
    likeliest_ = likeliest == list.end() ? -1 : likeliest->token;
    largest_ = likeliest == list.end() ? kNever : likeliest->logit;
    if (!std::is_sorted(list.begin(), list.end(), by_token)) std::sort(list.begin(), list.end(), by_token);
    tokens_.clear();
    logits_.clear();
    for (const Candidate & candidate : list) {
        tokens_.push_back(candidate.token);
        logits_.push_back(candidate.logit);
    }
}

bool Row::set_weights(const float * weights, size_t n_vocab) {
    n_vocab_ = n_vocab;
    is_list_ = true;
    Candidates candidates;
    for (size_t i = 0; i < n_vocab; i++) {
        if (weights[i] > 0) candidates.list.push_back({static_cast<int32_t>(i), std::log(weights[i]), weights[i]});
    }
    set_list(candidates);
    is_certain_ = tokens_.size() == 1;
    // Do not use logarithms: the given weights must be returned without rounding.
    double sum = 0;
    for (const Candidate & candidate : candidates.list) sum += candidate.prob;
    probs_.clear();
    for (const Candidate & candidate : candidates.list) probs_.push_back(static_cast<float>(candidate.prob / sum));
    return !tokens_.empty() && std::isfinite(sum);
}

void Row::set_temperature(float temperature) {
    is_certain_ = temperature < kColdest;
    if (is_certain_) {
        if (likeliest_ < 0) likeliest_ = static_cast<int32_t>(std::find(row_, row_ + n_vocab_, largest_) - row_);
        return;
    }
    if (is_list_) {
        double sum = 0;
        probs_.resize(logits_.size());
        for (size_t i = 0; i < probs_.size(); i++) sum += probs_[i] = std::exp((logits_[i] - largest_) / temperature);
        for (float & prob : probs_) prob = static_cast<float>(prob / sum);
        return;
    }
    set_rate(kLog2E / temperature);
}

void Row::set_rate(float rate) {
    softmax_ = {row_, largest_, rate, 1.0f};
    blocks_.clear();
    for (size_t begin = 0; begin < n_vocab_; begin += kBlock) {
        blocks_.push_back(kernels.weight_of(softmax_, begin, std::min(n_vocab_, begin + kBlock)));
    }
    normalize();
}

void Row::normalize() {
    const double sum = std::accumulate(blocks_.begin(), blocks_.end(), 0.0);
    softmax_.scale = static_cast<float>(softmax_.scale / sum);
    for (double & block : blocks_) block /= sum;
}

Row Row::certain(int32_t token) {
    Row row;
    row.is_certain_ = true;
    row.likeliest_ = token;
    return row;
}

void Row::share(const Row & other) {
    n_vocab_ = other.n_vocab_;
    is_list_ = other.is_list_;
    tokens_ = other.tokens_;
    logits_ = other.logits_;
    row_ = other.row_;
    largest_ = other.largest_;
    likeliest_ = other.likeliest_;
}

void Row::set_copy(const Row & other) {
    if (this == &other) return;
    share(other);
    is_certain_ = other.is_certain_;
    is_plain_ = other.is_plain_;
    probs_ = other.probs_;
    softmax_ = other.softmax_;
    blocks_ = other.blocks_;
    if (is_list_) row_ = nullptr;
    if (row_) keep_row(row_);
}

void Row::keep_row(const float * logits) {
    own_.assign(logits, logits + n_vocab_);
    row_ = softmax_.logits = own_.data();
}

bool Row::set_without(const Row & other, int32_t token) {
    set_copy(other);
    if (!is_list_ && !row_) return false;  // a token that was certain from the start
    if (is_list_) {
        const size_t i = std::lower_bound(tokens_.begin(), tokens_.end(), token) - tokens_.begin();
        const bool is_there = i < tokens_.size() && tokens_[i] == token;
        double sum = 0;
        for (size_t j = 0; j < probs_.size(); j++) sum += is_there && j == i ? 0 : probs_[j];
        if (tokens_.size() == size_t(is_there) || (!is_certain_ && !(sum > 0))) return false;
        if (is_there) {
            tokens_.erase(tokens_.begin() + i);
            if (!logits_.empty()) logits_.erase(logits_.begin() + i);
            if (!probs_.empty()) probs_.erase(probs_.begin() + i);
        }
        if (!logits_.empty()) {
            const size_t likeliest = std::max_element(logits_.begin(), logits_.end()) - logits_.begin();
            largest_ = logits_[likeliest];
            likeliest_ = tokens_[likeliest];
        }
        if (!is_certain_) {
            for (float & prob : probs_) prob = static_cast<float>(prob / sum);
        }
        return true;
    }
    if (is_plain_) {
        std::vector<float> left = own_;
        double sum = 0;
        left[token] = 0;
        return set_plain(left, sum);
    }
    if (row_ != own_.data()) keep_row(row_);
    const float logit = std::exchange(own_[token], kNever), largest = kernels.largest_of(row_, n_vocab_);
    if (!std::isfinite(largest)) {
        own_[token] = logit;
        return false;
    }
    largest_ = largest;
    likeliest_ = -1;
    is_certain_ ? set_temperature(0) : set_rate(softmax_.rate);
    return true;
}

float Row::gap() const {
    if (is_list_) return kernels.gap_of(logits_.data(), logits_.size());
    return row_ ? kernels.gap_of(row_, n_vocab_) : -kNever;
}

float Row::of(int32_t token) const {
    if (token < 0) return 0.0f;
    if (is_certain_) return token == likeliest_ ? 1.0f : 0.0f;
    if (is_list_) {
        const auto found = std::lower_bound(tokens_.begin(), tokens_.end(), token);
        return found != tokens_.end() && *found == token ? probs_[found - tokens_.begin()] : 0.0f;
    }
    float prob;
    weights(token, token + 1, &prob);
    return prob;
}

void Row::write(float * probs) const {
    if (!is_certain_ && !is_list_) return weights(0, n_vocab_, probs);
    std::fill(probs, probs + n_vocab_, 0.0f);
    if (is_certain_ && likeliest_ >= 0) probs[likeliest_] = 1;
    for (size_t i = 0; !is_certain_ && i < tokens_.size(); i++) probs[tokens_[i]] = probs_[i];
}

float Row::gap_without(int32_t token) const {
    float largest = kNever, second = kNever;
    const auto add = [&](float logit) {
        second = std::max(second, std::min(largest, logit));
        largest = std::max(largest, logit);
    };
    const auto add_all = [&](const float * begin, const float * end) {
        const float first = kernels.largest_of(begin, end - begin);
        if (!(first > kNever)) return;
        add(first);
        add(first - kernels.gap_of(begin, end - begin));
    };
    if (is_list_) {
        for (size_t i = 0; i < tokens_.size(); i++) {
            if (tokens_[i] != token) add(logits_[i]);
        }
    } else if (row_) {
        add_all(row_, row_ + token);
        add_all(row_ + token + 1, row_ + n_vocab_);
    }
    return largest > kNever ? largest - second : -1;
}

int32_t Row::pick(double uniform) const {
    if (is_certain_) return likeliest_;
    if (is_list_) {
        const double goal = uniform * std::accumulate(probs_.begin(), probs_.end(), 0.0);
        return tokens_[index_at(goal, tokens_.size(), [this](size_t i) { return probs_[i]; })];
    }
    return pick_block(blocks_, n_vocab_, uniform, [this](size_t begin, size_t end, float * out) { weights(begin, end, out); });
}

double Row::overlap(float factor, const Row & draft) const {
    double sum = 0;
    if (draft.is_certain_) return std::min(factor * of(draft.likeliest_), 1.0f);
    if (is_certain_) return std::min(factor, draft.of(likeliest_));
    if (is_list_ && draft.is_list_) {
        for (size_t i = 0, j = 0; i < tokens_.size() && j < draft.tokens_.size();) {
            if (tokens_[i] == draft.tokens_[j]) {
                sum += std::min(factor * probs_[i++], draft.probs_[j++]);
            } else if (tokens_[i] < draft.tokens_[j]) {
                i++;
            } else {
                j++;
            }
        }
        return sum;
    }
    if (is_list_) {
        for (size_t i = 0; i < tokens_.size(); i++) sum += std::min(factor * probs_[i], draft.of(tokens_[i]));
        return sum;
    }
    if (draft.is_list_) {
        for (size_t i = 0; i < draft.tokens_.size(); i++) sum += std::min(factor * of(draft.tokens_[i]), draft.probs_[i]);
        return sum;
    }
    if (!is_plain_) return kernels.overlap_of(softmax_, factor, draft.softmax_, 0, n_vocab_);
    float targets[kBlock], drafts[kBlock];
    for (size_t begin = 0; begin < n_vocab_; begin += kBlock) {
        const size_t n = std::min(n_vocab_ - begin, kBlock);
        weights(begin, begin + n, targets);
        kernels.weights_of(draft.softmax_, begin, begin + n, drafts);
        for (size_t i = 0; i < n; i++) targets[i] = std::min(factor * targets[i], drafts[i]);
        sum += sum_of(targets, n);
    }
    return sum;
}

void Row::weights(size_t begin, size_t end, float * out) const {
    if (!is_plain_) return kernels.weights_of(softmax_, begin, end, out);
    for (size_t i = begin; i < end; i++) out[i - begin] = own_[i] * softmax_.scale;
}

void Row::excess(size_t begin, size_t end, float factor, const Row & draft, float * left) const {
    weights(begin, end, left);
    float drafted[kBlock];
    if (!draft.is_certain_ && !draft.is_list_) {
        kernels.weights_of(draft.softmax_, begin, end, drafted);
    } else {
        std::fill(drafted, drafted + (end - begin), 0.0f);
        const auto put = [&](size_t token, float prob) {
            if (token >= begin && token < end) drafted[token - begin] = prob;
        };
        if (draft.is_certain_) put(draft.likeliest_, 1.0f);
        for (size_t i = 0; !draft.is_certain_ && i < draft.tokens_.size(); i++) put(draft.tokens_[i], draft.probs_[i]);
    }
    for (size_t i = 0; i < end - begin; i++) left[i] = std::max(factor * left[i] - drafted[i], 0.0f);
}

int32_t Row::pick_excess(float factor, const Row & draft, double uniform) const {
    if (is_certain_) return likeliest_;
    thread_local std::vector<double> sums;
    sums.clear();
    if (is_list_) {
        for (size_t i = 0; i < tokens_.size(); i++) sums.push_back(std::max(factor * probs_[i] - draft.of(tokens_[i]), 0.0f));
        const double total = std::accumulate(sums.begin(), sums.end(), 0.0);
        const size_t index = index_at(uniform * total, sums.size(), [](size_t i) { return sums[i]; });
        return index < sums.size() ? tokens_[index] : pick(uniform);
    }
    const bool both = !is_plain_ && !draft.is_certain_ && !draft.is_list_;
    double total = 0;
    for (size_t begin = 0; begin < n_vocab_; begin += kBlock) {
        const size_t end = std::min(n_vocab_, begin + kBlock);
        if (both) {
            sums.push_back(kernels.excess_of(softmax_, factor, draft.softmax_, begin, end));
        } else {
            float weights[kBlock];
            excess(begin, end, factor, draft, weights);
            sums.push_back(std::accumulate(weights, weights + (end - begin), 0.0));
        }
        total += sums.back();
    }
    if (!(total > 0)) return pick(uniform);
    const auto fill = [&](size_t begin, size_t end, float * weights) { excess(begin, end, factor, draft, weights); };
    const int32_t token = pick_block(sums, n_vocab_, uniform, fill);
    return token < 0 ? pick(uniform) : token;
}

bool Row::set_plain(std::vector<float> & weights, double & sum) {
    thread_local std::vector<double> sums;
    sums.clear();
    for (size_t begin = 0; begin < weights.size(); begin += kBlock) {
        sums.push_back(sum_of(weights.data() + begin, std::min(weights.size() - begin, kBlock)));
    }
    sum = std::accumulate(sums.begin(), sums.end(), 0.0);
    if (!(sum > 0)) return false;
    own_.swap(weights);
    n_vocab_ = own_.size();
    row_ = own_.data();
    is_list_ = is_certain_ = false;
    is_plain_ = true;
    softmax_.scale = static_cast<float>(1 / sum);
    blocks_.clear();
    for (double each : sums) blocks_.push_back(each / sum);
    return true;
}

double Row::set_excess(const Row & other, float factor, const Row & draft) {
    if (other.is_certain_ || draft.is_certain_) {
        const double left = factor - other.overlap(factor, draft);
        if (!(left > 0)) return 0;
        if (other.is_certain_) *this = certain(other.likeliest_);
        return other.is_certain_ || set_without(other, draft.likeliest_) ? left : 0;
    }
    double sum = 0;
    if (!other.is_list_) {
        thread_local std::vector<float> left;
        left.resize(other.n_vocab_);
        for (size_t begin = 0; begin < other.n_vocab_; begin += kBlock) {
            other.excess(begin, std::min(other.n_vocab_, begin + kBlock), factor, draft, left.data() + begin);
        }
        return set_plain(left, sum) ? sum : 0;
    }
    std::vector<int32_t> tokens;
    std::vector<float> probs;
    for (size_t i = 0; i < other.tokens_.size(); i++) {
        const float left = factor * other.probs_[i] - draft.of(other.tokens_[i]);
        if (!(left > 0)) continue;
        tokens.push_back(other.tokens_[i]);
        probs.push_back(left);
        sum += left;
    }
    if (!(sum > 0)) return 0;
    for (float & prob : probs) prob = static_cast<float>(prob / sum);
    n_vocab_ = other.n_vocab_;
    is_list_ = true;
    is_certain_ = false;
    tokens_ = std::move(tokens);
    probs_ = std::move(probs);
    logits_.clear();
    return sum;
}

}  // namespace ggufspec
