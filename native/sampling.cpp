#include "sampling.h"

#include <algorithm>
#include <bitset>
#include <cmath>
#include <utility>

#include "large.h"
#include "penalties.h"

namespace ggufspec {
namespace {

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
        goal -= each.probs[i];
        if (goal < 0) break;
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

}  // namespace ggufspec
