// Python bindings: drafts from earlier text.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "ngrams.h"

namespace ggufspec::bindings {
namespace {

void require_places(size_t n) { require(n < std::numeric_limits<int32_t>::max(), "the texts of an index are too long together"); }

size_t update(Ngrams & self, TokenRow tokens) {
    require_places(tokens.shape(0));
    return self.update(tokens.data(), tokens.shape(0));
}

void add_text(SortedTexts & self, TokenRow tokens) {
    require_places(self.tokens().size() + tokens.shape(0));
    self.add(tokens.data(), tokens.shape(0));
}

void make_ngrams(Ngrams * self, const std::vector<std::tuple<size_t, double, double, double, double>> & priors,
                 double prior_weight, const std::shared_ptr<SortedTexts> & prediction,
                 const std::vector<std::shared_ptr<SortedTexts>> & others) {
    std::vector<NgramAcceptance::Prior> made;
    for (const auto & [min_length, own, own_contested, other, other_contested] : priors) {
        const bool rises = made.empty() ? min_length == 1 : min_length > made.back().min_length;
        require(rises, "Ngrams: needs priors by rising match length, from 1 on");
        for (double p : {own, own_contested, other, other_contested})
            require(p > 0 && p < 1, "Ngrams: a prior must be between 0 and 1");
        made.push_back({min_length, {own, own_contested, other, other_contested}});
    }
    require(!made.empty() && prior_weight > 0, "Ngrams: needs priors with a weight above 0");
    for (const auto & each : others) require(each != nullptr, "Ngrams: one of the other texts is None");
    new (self) Ngrams(NgramAcceptance(made, prior_weight), prediction, {others.begin(), others.end()});
}

std::tuple<Tokens, std::vector<double>, Tokens, std::vector<double>, int> predict(Ngrams & self, size_t n_most) {
    auto found = self.predict(n_most);
    auto probabilities = self.probabilities(found);
    return {std::move(found.tokens), std::move(probabilities), std::move(found.lengths), std::move(found.shares),
            int(found.origin)};
}

void observe(Ngrams & self, size_t n_accepted, size_t n_tried) {
    require(n_tried <= self.n_predicted(), "observe: the last prediction has fewer tokens");
    require(n_accepted <= n_tried, "observe: more tokens accepted than tried");
    self.observe(n_accepted, n_tried);
}

}  // namespace

void bind_ngrams(nb::module_ & m) {
    m.def(
        "n_same",
        [](const TokenRow & a, const TokenRow & b) {
            const size_t n = std::min(a.shape(0), b.shape(0));
            return size_t(std::mismatch(a.data(), a.data() + n, b.data()).first - a.data());
        },
        "a"_a.noconvert(), "b"_a.noconvert(), nb::sig("def n_same(a: object, b: object) -> int"),
        "Length of the common prefix of two arrays of int32.");
    nb::class_<SortedTexts>(m, "SortedTexts", "Texts with an index for Ngrams: 8 bytes per token. Not for two threads at once.")
        .def(nb::init<>())
        .def("add", &add_text, "tokens"_a.noconvert(), "Add a text (n,).")
        .def("drop", &SortedTexts::drop, "n_most"_a,
             "Remove whole texts, the oldest first, until at most n_most tokens are left, counting one more for each text.")
        .def("__len__", [](const SortedTexts & self) { return self.tokens().size(); });
    nb::class_<Ngrams>(m, "Ngrams",
                       "Predicts how a text continues from what followed the same tokens earlier in it, or in others.\n\n"
                       "Not for two threads at once.")
        .def("__init__", &make_ngrams, "priors"_a, "prior_weight"_a, "prediction"_a = nb::none(),
             "others"_a = std::vector<std::shared_ptr<SortedTexts>>(),
             "priors: (min_length, *probabilities) by match length; see NgramAcceptance in native/ngrams.h. prediction: a text\n"
             "that the text may repeat; its matches count like the text's own. others: further texts, used if their matches are\n"
             "much longer.")
        .def("update", &update, "tokens"_a.noconvert(),
             "Make tokens (n,) the text: usually the previous text and a few more. Returns the length of the common prefix.")
        .def("predict", &predict, "n_most"_a,
             "Up to n_most tokens that may follow, by the longest matches of the text's end: (tokens, probabilities, lengths,\n"
             "shares, origin).\n\n"
             "For each token, if the tokens before it are accepted: its acceptance probability; the number of tokens before it\n"
             "that match its sources (at most 32); its share of the votes. origin: 0: the text itself, 1: its prediction, 2:\n"
             "other texts. Empty if the last token is new; at most 1024 tokens.")
        .def("observe", &observe, "n_accepted"_a, "n_tried"_a,
             "Learn that, of the last prediction's first n_tried tokens, n_accepted were right and the next was wrong.\n\n"
             "The prediction is then discarded.")
        .def_prop_ro("n_compared", &Ngrams::n_compared, "Number of earlier occurrences compared so far.");
}

}  // namespace ggufspec::bindings
