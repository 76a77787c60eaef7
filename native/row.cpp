// The distribution of a row: reading it, drawing from it, and what is left of it beside another one.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "sampling.h"

namespace ggufspec {
namespace {

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

}  // namespace

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
