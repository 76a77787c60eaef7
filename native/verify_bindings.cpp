// Python bindings: rules of verification.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "rows.h"
#include "verify.h"

namespace ggufspec::bindings {
namespace {

Judged judged(const Tokens & tokens, const Tokens & parents, const Rows * draft, const Rows & target, const Uniforms & uniforms) {
    const size_t n_draft = tokens.size();
    require(target.n == n_draft + 1, "verify: target_probs needs n_draft + 1 rows");
    require(uniforms.size() == n_draft + 1, "verify: needs n_draft + 1 uniforms");
    require(!draft || (draft->n == n_draft && draft->n_vocab == target.n_vocab),
            "verify: draft.probs needs n_draft rows, as wide as the target's");
    require_tokens(tokens.data(), n_draft, target.n_vocab);
    require_parents(parents, n_draft);
    return {tokens.data(),
            parents.empty() ? nullptr : parents.data(),
            draft ? draft->rows.data() : nullptr,
            target.rows.data(),
            uniforms.data(),
            n_draft};
}

// (n_accepted, next_token, path); no path for a chain.
template <Verdict (*rule)(const Judged &)>
std::tuple<int32_t, int32_t, std::optional<Tokens>> verdict(const Tokens & tokens, const Tokens & parents, const Rows * draft,
                                                            const Rows & target, const Uniforms & uniforms) {
    const auto found = rule(judged(tokens, parents, draft, target, uniforms));
    if (parents.empty()) return {found.node + 1, found.next_token, std::nullopt};
    Tokens path;
    for (int32_t node = found.node; node >= 0; node = parents[node]) path.push_back(node);
    std::reverse(path.begin(), path.end());
    return {int32_t(path.size()), found.next_token, std::move(path)};
}

}  // namespace

void bind_verify(nb::module_ & m) {
    m.def("match", &verdict<match>, "tokens"_a, "parents"_a, "draft"_a.none(), "target"_a, "uniforms"_a,
          "Verify by equality with the target's own draws: (n_accepted, next_token, path); path is None for a chain.");
    m.def("rejection", &verdict<rejection>, "tokens"_a, "parents"_a, "draft"_a.none(), "target"_a, "uniforms"_a,
          "Verify by token-wise rejection sampling; returns the same as match.");
    m.def("traversal", &verdict<traversal>, "tokens"_a, "parents"_a, "draft"_a.none(), "target"_a, "uniforms"_a,
          "Verify by traversal verification; returns the same as match.");
}

}  // namespace ggufspec::bindings
