// Python bindings: samplers, and rows of distributions.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings.h"
#include "rows.h"
#include "sampling.h"
#include "draft_length.h"

namespace ggufspec::bindings {
namespace {

constexpr std::pair<const char *, Sampler> kSamplers[]{
    {"penalties", Sampler::penalties},
    {"dry", Sampler::dry},
    {"top_n_sigma", Sampler::top_n_sigma},
    {"top_k", Sampler::top_k},
    {"typical_p", Sampler::typical_p},
    {"top_p", Sampler::top_p},
    {"min_p", Sampler::min_p},
    {"xtc", Sampler::xtc},
    {"mirostat", Sampler::mirostat},
    {"temperature", Sampler::temperature},
    {"adaptive_p", Sampler::adaptive_p},
};

void make_breakers(Breakers * self, const std::vector<std::pair<Tokens, TokenRow>> & breakers) {
    Breakers made;
    for (const auto & [tail, heads] : breakers) {
        for (size_t i = 0; i < heads.size(); i++)
            made.heads.emplace_back(heads.data()[i], static_cast<uint32_t>(made.tails.size()));
        made.tails.push_back(tail);
    }
    std::sort(made.heads.begin(), made.heads.end());
    new (self) Breakers(std::move(made));
}

// `numbers`: the values of the options, by name.
void make_sampling(Sampling * self, const std::vector<std::string> & samplers, const Numbers & numbers,
                   std::shared_ptr<Breakers> dry_breakers, std::vector<std::pair<int32_t, float>> logit_bias,
                   std::shared_ptr<TextState> state) {
    Sampling made;
    for (const std::string & name : samplers) {
        const auto found = std::find_if(std::begin(kSamplers), std::end(kSamplers), [&](auto & of) { return name == of.first; });
        require(found != std::end(kSamplers), "Sampling: an unknown sampler");
        made.order.push_back(found->second);
    }
    const auto take = [&numbers](const char * name, auto & number) {
        number = nb::cast<std::remove_reference_t<decltype(number)>>(numbers[name]);
    };
    take("temperature", made.temperature);
    take("dynatemp_range", made.dynatemp_range);
    take("dynatemp_exponent", made.dynatemp_exponent);
    take("top_k", made.top_k);
    take("top_p", made.top_p);
    take("min_p", made.min_p);
    take("typical_p", made.typical_p);
    take("top_n_sigma", made.top_n_sigma);
    take("xtc_probability", made.xtc_probability);
    take("xtc_threshold", made.xtc_threshold);
    take("repeat_last_n", made.penalty_last_n);
    take("repeat_penalty", made.repeat_penalty);
    take("frequency_penalty", made.frequency_penalty);
    take("presence_penalty", made.presence_penalty);
    take("dry_multiplier", made.dry_multiplier);
    take("dry_base", made.dry_base);
    take("dry_allowed_length", made.dry_allowed_length);
    take("dry_penalty_last_n", made.dry_last_n);
    take("mirostat", made.mirostat);
    take("mirostat_tau", made.mirostat_tau);
    take("mirostat_eta", made.mirostat_eta);
    take("adaptive_target", made.adaptive_target);
    take("adaptive_decay", made.adaptive_decay);
    made.dry_breakers = std::move(dry_breakers);
    made.logit_bias = std::move(logit_bias);
    made.state = std::move(state);
    new (self) Sampling(std::move(made));
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> dense(const Rows & self) {
    auto * probs = new float[self.n * self.n_vocab]();
    nb::capsule owner(probs, [](void * p) noexcept { delete[] static_cast<float *>(p); });
    for (size_t i = 0; i < self.n; i++) self.rows[i].write(probs + i * self.n_vocab);
    return {probs, {self.n, self.n_vocab}, owner};
}

ConstMatrix rows_at(uintptr_t address, size_t n_rows, size_t n_vocab) {
    require(address != 0, "rows_at: there are no rows at a null address");
    return ConstMatrix(reinterpret_cast<const float *>(address), {n_rows, n_vocab}, nb::handle());
}

}  // namespace

void bind_sampling(nb::module_ & m) {
    nb::class_<Breakers>(m, "Breakers", "The sequence breakers of DRY.")
        .def("__init__", &make_breakers, "breakers"_a, "breakers: (tokens that have to follow, first tokens) of each, in int32.");
    nb::class_<TextState>(m, "TextState", "What mirostat and adaptive_p know of a text so far, and banned tokens.")
        .def(
            "__init__", [](TextState * made, uint64_t seed) { new (made) TextState{seed, {}, {}}; }, "seed"_a = 0,
            "seed: of what adaptive_p cannot know from the text: in which case of XTC a token was drawn.")
        .def_prop_ro(
            "has_bans", [](const TextState & self) { return !self.bans.empty(); }, "Whether a token is banned.")
        .def("__copy__", [](const TextState & self) { return TextState(self); })
        .def(
            "rewind",
            [](TextState & self, size_t n_dropped, size_t n_tokens, int32_t token) {
                self.states.resize(self.states.size() - std::min(n_dropped, self.states.size()));
                self.bans.erase(self.bans.upper_bound(n_tokens), self.bans.end());
                self.bans[n_tokens].push_back(token);
                self.seed = mixed(self.seed);  // what was drawn before depends on the coins that it had
            },
            "n_dropped"_a, "n_tokens"_a, "token"_a,
            "Forget the last n_dropped tokens; n_tokens are left, with the prompt. `token` may not follow them.");
    nb::class_<Sampling>(m, "Sampling", "How logits become a distribution.")
        .def("__init__", &make_sampling, nb::kw_only(), "samplers"_a, "numbers"_a, "dry_breakers"_a.none(), "logit_bias"_a,
             "state"_a.none(), "numbers: the numeric options by name. state: of the text; None: at the start of a text.")
        .def_prop_ro("has_state", &Sampling::has_state, "Whether distributions depend on the state.");
    nb::class_<Rows>(m, "Rows",
                     "Distributions over the vocabulary, at most n_most of them; numpy.asarray(rows): (n, n_vocab).\n\n"
                     "Not for two threads at once.")
        .def(nb::init<size_t, size_t>(), "n_most"_a, "n_vocab"_a)
        .def(
            "fill",
            [](Rows & self, ConstMatrix logits, const Sampling & sampling, TokenRow tokens, const Tokens & draft,
               const Tokens & parents, const std::optional<ConstMasks> & masks) {
                self.n = 0;
                self.logits = logits;
                self.n_in_place = 0;
                self.has_declined = false;  // it may be one of the logits before
                self.add(logits, sampling, tokens, draft, parents, masks, false);
                self.n_in_place = self.n;
            },
            "logits"_a.noconvert(), "sampling"_a, "tokens"_a.noconvert(), "draft"_a, "parents"_a, "masks"_a.noconvert().none(),
            "Become the distributions of logits (n_draft + 1, n_vocab) after tokens, then after each of draft.\n\n"
            "parents: in a tree, the parent of each node, -1 for the text; empty for a chain. "
            "masks (n_draft + 1, n_words): bit i % 32 of word i // 32 says whether token i is allowed there. The logits are read "
            "in place, also later: the rows are valid as long as the logits.")
        .def(
            "draw",
            [](Rows & self, ConstMatrix logits, const Sampling & sampling, TokenRow tokens,
               const std::optional<ConstMasks> & masks, LengthPolicy * policy, double uniform) -> int32_t {
                require(logits.shape(0) == 1, "draw: needs one row of logits");
                self.add(logits, sampling, tokens, {}, {}, masks, true);
                if (!policy || policy->should_draw(kernels.gap_of(logits.data(), logits.shape(1)))) {
                    return self.rows[self.n - 1].pick(uniform);
                }
                self.decline();
                return -1;
            },
            "logits"_a.noconvert(), "sampling"_a, "tokens"_a.noconvert(), "masks"_a.noconvert().none(), "policy"_a.none(),
            "uniform"_a,
            "Append the distribution of logits (1, n_vocab) after tokens, and draw a token from it if policy.should_draw, or "
            "without a policy.\n\n"
            "Otherwise returns -1: len does not count the row, but overlap can read it as the row after the last, even if\n"
            "further rows are added; keep drops it.")
        .def(
            "draw_declined",
            [](Rows & self, LengthPolicy & policy, double uniform) {
                require(self.has_declined && self.n + 1 < self.rows.size(),
                        "draw_declined: there is no such row, or no room for it");
                require(policy.n_evaluated() > 0, "draw_declined: the policy has seen no row");
                std::swap(self.rows[self.n], self.rows.back());
                self.has_declined = false;
                policy.draw_declined();
                return self.rows[self.n++].pick(uniform);
            },
            "policy"_a, "uniform"_a, "Draw from the row that draw has declined; it becomes the last row.")
        .def("advance", &Rows::advance, "sampling"_a, "nodes"_a, "token"_a,
             "Move the state of `sampling`, which filled the rows, on: over accepted nodes of the draft, and the token behind.")
        .def("append_certain", &Rows::add_certain, "token"_a, "Append a row in which this token is certain.")
        .def("append_without", &Rows::add_without, "i"_a, "token"_a,
             "Append row i without one token, renormalised: the distribution of a second child.\n\n"
             "At temperature 0 the next likeliest token is certain. Returns False and adds no row if no other token is left.")
        .def("append_from", &Rows::add_from, "other"_a, "i"_a,
             "Append a copy of row i of other, which does not depend on its logits.")
        .def("decline", &Rows::decline,
             "Drop the last row without drawing from it; overlap can still read it, as after a draw that returned -1.")
        .def("append_weights", &Rows::add_weights, "weights"_a.noconvert(),
             "Append the distributions in proportion to weights (n, n_vocab).")
        .def(
            "keep",
            [](Rows & self, size_t n) {
                require(n <= self.n, "keep: there are fewer rows");
                self.n = n;
                self.n_in_place = std::min(n, self.n_in_place);
                self.has_declined = false;
            },
            "n"_a, "Drop all rows but the first n.")
        .def("__len__", [](const Rows & self) { return self.n; })
        .def(
            "__array__", [](const Rows & self, nb::object, nb::object) { return dense(self); }, "dtype"_a = nb::none(),
            "copy"_a = nb::none(), "All probabilities (n, n_vocab).")
        .def(
            "overlap",
            [](const Rows & self, size_t i, const Rows & draft, size_t j) {
                require(self.n_vocab == draft.n_vocab, "overlap: the rows differ in shape");
                require(j < draft.n + draft.has_declined, "overlap: the draft has no such row");
                return self.at(i).overlap(1.0f, j < draft.n ? draft.rows[j] : draft.rows.back());
            },
            "i"_a, "draft"_a, "j"_a,
            "The probability that a token drawn from row j of a draft is accepted by row i of its target.")
        .def_prop_ro(
            "has_declined", [](const Rows & self) { return self.has_declined; },
            "Whether overlap can read a row after the last: see draw.")
        .def(
            "gap_without",
            [](const Rows & self, size_t i, int32_t token) {
                require_tokens(&token, 1, self.n_vocab);
                return self.at(i).gap_without(token);
            },
            "i"_a, "token"_a, "The logit gap of row i without this token; below 0 if no token is left.")
        .def("gap", &Rows::gap, "i"_a,
             "The difference of the two largest logits of row i: before sampling in rows that fill made, else among the\n"
             "tokens that remain after truncation. Infinity if there is only one.")
        .def(
            "of",
            [](const Rows & self, size_t i, int32_t token) {
                require_tokens(&token, 1, self.n_vocab);
                return self.at(i).of(token);
            },
            "i"_a, "token"_a, "The probability of a token in row i.")
        .def(
            "pick", [](const Rows & self, size_t i, double uniform) { return self.at(i).pick(uniform); }, "i"_a, "uniform"_a,
            "Draw a token from row i with a uniform in [0, 1); -1 if the constraint allows none.");
    m.def(
        "gap_of",
        [](ConstMatrix logits) {
            require(logits.shape(0) > 0, "gap_of: there is no row");
            return kernels.gap_of(logits.data(), logits.shape(1));
        },
        "logits"_a.noconvert(), "The difference of the two largest logits in the first row.");
    m.def("rows_at", &rows_at, nb::rv_policy::reference, "address"_a, "n_rows"_a, "n_vocab"_a,
          "A view of floats (n_rows, n_vocab) at an address: valid as long as the memory there is.");
}

}  // namespace ggufspec::bindings
