#include "ngrams.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

namespace ggufspec {

namespace {

constexpr uint64_t kBase = 0x9E3779B97F4A7C15;  // hashes are polynomials of the tokens at this, modulo 2^64
constexpr uint64_t kMix = 0xD6E8FEB86659FD93;   // spreads a hash over its upper bits, which are the slot
constexpr int kSlotBitsFirst = 15;

// Weight of a match beside the next more recent one [measured: on code and prose better than 0, the most recent
// alone, and than 1, the majority].
constexpr double kOlder = 0.85;

void count(uint16_t & n) {
    if (n < std::numeric_limits<uint16_t>::max()) n++;
}

}  // namespace

NgramAcceptance::NgramAcceptance(const std::vector<Prior> & priors, double prior_weight, double keep, double rate)
    : prior_weight_(prior_weight), keep_(keep), rate_(rate) {
    for (const Prior & prior : priors) {
        min_lengths_.push_back(prior.min_length);
        for (double p : {prior.unanimous, prior.contested}) log_odds_.push_back(std::log(p / (1 - p)));
    }
    n_right_.assign(log_odds_.size(), 0);
    n_seen_.assign(log_odds_.size(), 0);
}

std::vector<double> NgramAcceptance::probabilities(const Prediction & prediction) {
    kinds_.clear();
    std::vector<double> found;
    for (size_t i = 0; i < prediction.tokens.size(); i++) {
        const size_t length = size_t(std::max(prediction.lengths[i], 1));
        const size_t above = std::upper_bound(min_lengths_.begin(), min_lengths_.end(), length) - min_lengths_.begin();
        const size_t kind = 2 * (above - 1) + (prediction.shares[i] < 1);
        found.push_back(!kinds_.empty() && kinds_.back() == kind ? found.back() : probability(kind));
        kinds_.push_back(kind);
    }
    return found;
}

void NgramAcceptance::observe(size_t n_accepted, size_t n_tried) {
    // The first rejected token was verified as well; those behind it were not.
    for (size_t i = 0; i < std::min({n_tried, n_accepted + 1, kinds_.size()}); i++) {
        const size_t kind = kinds_[i];
        const double right = i < n_accepted;
        n_right_[kind] = keep_ * n_right_[kind] + right;
        n_seen_[kind] = keep_ * n_seen_[kind] + 1;
        shift_ += rate_ * (right - prior(kind));
    }
    kinds_.clear();
}

double NgramAcceptance::prior(size_t kind) const { return 1 / (1 + std::exp(-log_odds_[kind] - shift_)); }

double NgramAcceptance::probability(size_t kind) const {
    return (prior_weight_ * prior(kind) + n_right_[kind]) / (prior_weight_ + n_seen_[kind]);
}

Ngrams::Ngrams(NgramAcceptance acceptance) : acceptance_(std::move(acceptance)), hashes_{0}, n_slot_bits_(kSlotBitsFirst) {
    for (auto & last : last_) last.assign(size_t{1} << n_slot_bits_, -1);
    powers_.fill(1);
    for (size_t i = 0; i < kSpansN; i++) {
        for (size_t k = 0; k < kSpans[i]; k++) powers_[i] *= kBase;
    }
}

size_t Ngrams::update(const int32_t * tokens, size_t n) {
    size_t n_common = std::min(n, text_.size());
    // Usually nothing differs, and memcmp is several times as fast as mismatch.
    if (n_common > 0 && std::memcmp(tokens, text_.data(), n_common * sizeof *tokens) != 0) {
        n_common = std::mismatch(tokens, tokens + n_common, text_.begin()).first - tokens;
    }
    forget_from(n_common);
    make_room(n);
    for (size_t i = n_common; i < n; i++) add(tokens[i]);
    return n_common;
}

Prediction Ngrams::predict(size_t n_most) {
    voters_.clear();
    n_voters_.clear();
    Prediction prediction;
    const size_t n_text = text_.size();
    size_t length = find_sources();
    if (length == 0) return prediction;
    // Predicted tokens are appended to the text meanwhile: a source that reaches the end goes on in them.
    for (size_t i = 0; i < std::min(n_most, kMostPredicted); i++) {
        prediction.shares.push_back(vote());
        prediction.lengths.push_back(static_cast<int32_t>(length));
        length = std::min(length + 1, kMostMatch);
    }
    prediction.tokens.assign(text_.begin() + n_text, text_.end());
    text_.resize(n_text);
    return prediction;
}

void Ngrams::observe(size_t n_accepted, size_t n_tried) {
    acceptance_.observe(n_accepted, n_tried);
    size_t voter = 0;
    for (size_t i = 0; i < n_tried && i <= n_accepted; i++) {
        for (; voter < n_voters_[i]; voter++) {
            const auto [place, agrees] = voters_[voter];
            if (static_cast<size_t>(place) >= places_.size()) continue;  // itself a prediction, or removed since
            if (i < n_accepted) count(agrees ? places_[place].n_right : places_[place].n_wrong);
            else if (agrees) count(places_[place].n_wrong);  // the other votes cannot be judged
        }
    }
    voters_.clear();
    n_voters_.clear();
}

void Ngrams::forget_from(size_t n) {
    // Newest first, so that each slot gets back what it held before.
    for (size_t place = places_.size(); place-- > n;) {
        for (size_t i = 0; i < kSpansN && kSpans[i] <= place + 1; i++) last_[i][slot(place, i)] = places_[place].before[i];
    }
    text_.resize(n);
    places_.resize(n);
    hashes_.resize(n + 1);
}

// Twice as many slots as tokens, so that runs rarely collide.
void Ngrams::make_room(size_t n) {
    if (2 * n <= last_[0].size()) return;
    while (2 * n > size_t{1} << n_slot_bits_) n_slot_bits_++;
    for (auto & last : last_) last.assign(size_t{1} << n_slot_bits_, -1);
    for (size_t place = 0; place < places_.size(); place++) link(place);
}

void Ngrams::add(int32_t token) {
    text_.push_back(token);
    hashes_.push_back(hashes_.back() * kBase + static_cast<uint32_t>(token) + 1);
    places_.emplace_back();
    link(places_.size() - 1);
}

void Ngrams::link(size_t place) {
    places_[place].before.fill(-1);
    for (size_t i = 0; i < kSpansN && kSpans[i] <= place + 1; i++) {
        int32_t & last = last_[i][slot(place, i)];
        places_[place].before[i] = last;
        last = static_cast<int32_t>(place);
    }
}

// Of the run of kSpans[span] tokens that ends at `place`.
size_t Ngrams::slot(size_t place, size_t span) const {
    const uint64_t hash = hashes_[place + 1] - hashes_[place + 1 - kSpans[span]] * powers_[span];
    return ((hash ^ hash >> 32) * kMix) >> (64 - n_slot_bits_);
}

// How many tokens up to `place` are those up to the end of the text.
size_t Ngrams::match_length(size_t place) const {
    const size_t end = text_.size() - 1;
    const size_t n_most = std::min(kMostMatch, place + 1);
    size_t n = 0;
    while (n < n_most && text_[place - n] == text_[end - n]) n++;
    return n;
}

// The longest matches of the text's end, by the longest span that finds any. Returns their length.
size_t Ngrams::find_sources() {
    sources_.clear();
    size_t longest = 0;
    for (size_t i = kSpansN; i-- > 0 && !text_.empty() && longest == 0;) {
        int32_t place = places_.back().before[i];
        for (size_t n = 0; n < kMostSources && place >= 0; n++, place = places_[place].before[i]) {
            n_examined_++;
            const size_t length = match_length(place);
            if (length < std::max(kSpans[i], longest)) continue;  // shorter, or a hash collision
            if (length > longest) sources_.clear();
            longest = length;
            sources_.push_back({place + 1, sources_.empty() ? 1.0 : sources_.back().weight * kOlder});
        }
    }
    return longest;
}

// The probability that a source is right, from its own record.
double Ngrams::reliability(int32_t place) const {
    if (static_cast<size_t>(place) >= places_.size()) return 0.5;
    const Place & at = places_[place];
    return (at.n_right + 1.0) / (at.n_right + at.n_wrong + 2.0);
}

// Appends the token with the most votes, and keeps the sources that agree. Returns its share.
double Ngrams::vote() {
    struct Choice {
        int32_t token;
        double votes;
    };
    std::array<Choice, kMostSources> choices{};
    size_t n_choices = 0;
    double all = 0;
    for (const Source & source : sources_) {
        const int32_t token = text_[source.place];
        const double reliable = reliability(source.place);
        size_t i = 0;
        while (i < n_choices && choices[i].token != token) i++;
        if (i == n_choices) choices[n_choices++] = {token, 0};
        choices[i].votes += source.weight * reliable;
        all += source.weight * std::max(reliable, 1 - reliable);  // one that was mostly wrong is a vote against
    }
    // Ties go to the first, which is the most recent.
    const Choice best = *std::max_element(choices.begin(), choices.begin() + n_choices,
                                          [](const Choice & a, const Choice & b) { return a.votes < b.votes; });
    size_t n_kept = 0;
    for (const Source source : sources_) {
        const bool agrees = text_[source.place] == best.token;
        voters_.push_back({source.place, agrees});
        if (agrees) sources_[n_kept++] = {source.place + 1, source.weight};
    }
    sources_.resize(n_kept);
    n_voters_.push_back(voters_.size());
    text_.push_back(best.token);
    return best.votes / all;
}

}  // namespace ggufspec
