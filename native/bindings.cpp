// Python bindings: types, shapes and the GIL; no arithmetic.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "context.h"
#include "cost_model.h"
#include "draft_length.h"
#include "ngrams.h"
#include "matmul/bindings.h"
#include "sampling.h"
#include "unlocked.h"
#include "verify.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using ggufspec::Unlocked;
using ConstMatrix = nb::ndarray<const float, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstMasks = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using TokenRow = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tokens = std::vector<int32_t>;
using Uniforms = std::vector<double>;
using Numbers = nb::typed<nb::dict, nb::str, nb::float_>;

void require(bool holds, const char * message) {
    if (!holds) throw nb::value_error(message);
}

void require_tokens(const int32_t * tokens, size_t n, size_t n_vocab) {
    for (size_t i = 0; i < n; i++) {
        if (tokens[i] >= 0 && static_cast<size_t>(tokens[i]) < n_vocab) continue;
        throw nb::value_error(("token " + std::to_string(tokens[i]) + " is outside the vocabulary").c_str());
    }
}

void require_parents(const Tokens & parents, size_t n) {
    require(parents.empty() || parents.size() == n, "a tree needs a parent for each node");
    for (size_t i = 0; i < parents.size(); i++) {
        require(parents[i] >= -1 && parents[i] < int32_t(i), "a node of a tree must follow its parent");
    }
}

ggufspec::Constants constants() {
    const nb::module_ module = nb::module_::import_("ggufspec.drafting.constants");
    ggufspec::Constants found;
#define GGUFSPEC_READ(name) found.name = nb::cast<double>(module.attr(#name));
    GGUFSPEC_CONSTANTS(GGUFSPEC_READ)
#undef GGUFSPEC_READ
    found.PRIOR_GAPS = nb::cast<std::vector<double>>(module.attr("PRIOR_GAPS"));
    return found;
}

// `start`: a Start, or None.
ggufspec::StartingCosts starting_costs(const nb::object & start) {
    if (start.is_none()) return {};
    return {nb::cast<std::vector<double>>(start.attr("target")), nb::cast<double>(start.attr("step")),
            nb::cast<double>(start.attr("read")), nb::cast<bool>(start.attr("is_measured")),
            nb::cast<bool>(start.attr("guesses_step"))};
}

void make_cost_model(ggufspec::CostModel * self, size_t n_most, size_t n_sharers, const nb::object & start, size_t n_per_step) {
    require(n_most > 0 && n_sharers > 0 && n_per_step > 0, "CostModel: needs numbers above 0");
    new (self) ggufspec::CostModel(constants(), n_most, n_sharers, n_per_step, starting_costs(start));
}

constexpr std::pair<const char *, ggufspec::Sampler> kSamplers[]{
    {"penalties", ggufspec::Sampler::penalties},
    {"dry", ggufspec::Sampler::dry},
    {"top_n_sigma", ggufspec::Sampler::top_n_sigma},
    {"top_k", ggufspec::Sampler::top_k},
    {"typical_p", ggufspec::Sampler::typical_p},
    {"top_p", ggufspec::Sampler::top_p},
    {"min_p", ggufspec::Sampler::min_p},
    {"xtc", ggufspec::Sampler::xtc},
    {"mirostat", ggufspec::Sampler::mirostat},
    {"temperature", ggufspec::Sampler::temperature},
    {"adaptive_p", ggufspec::Sampler::adaptive_p},
};

void make_breakers(ggufspec::Breakers * self, const std::vector<std::pair<Tokens, TokenRow>> & breakers) {
    ggufspec::Breakers made;
    for (const auto & [tail, heads] : breakers) {
        for (size_t i = 0; i < heads.size(); i++)
            made.heads.emplace_back(heads.data()[i], static_cast<uint32_t>(made.tails.size()));
        made.tails.push_back(tail);
    }
    std::sort(made.heads.begin(), made.heads.end());
    new (self) ggufspec::Breakers(std::move(made));
}

// `numbers`: the values of the options, by name.
void make_sampling(ggufspec::Sampling * self, const std::vector<std::string> & samplers, const Numbers & numbers,
                   std::shared_ptr<ggufspec::Breakers> dry_breakers, std::vector<std::pair<int32_t, float>> logit_bias,
                   std::shared_ptr<ggufspec::TextState> state) {
    ggufspec::Sampling made;
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
    new (self) ggufspec::Sampling(std::move(made));
}

// Rows of distributions. Rows that use logits without a copy keep the array alive.
struct Rows {
    std::vector<ggufspec::Row> rows;
    std::vector<ggufspec::State> states;  // before the token of each row that `fill` made
    size_t n = 0, n_vocab;
    size_t n_in_place = 0;  // the first rows: of `logits`
    bool has_declined = false;  // the very last row was computed, but not drawn from
    ConstMatrix logits;

    // One row more than n_most, for a declined one: others may be added before it is read.
    Rows(size_t n_most, size_t n_vocab) : rows(n_most + 1), n_vocab(n_vocab) {
        require(n_vocab > 0, "Rows: a row has no tokens");
    }

    const ggufspec::Row & at(size_t i) const {
        require(i < n, "Rows: there is no row of that number");
        return rows[i];
    }

    // The distributions after `text`, then after each token of `draft`, which is a tree if it has `parents`; `masks`: which
    // tokens each may have; `keep`: copy the logits.
    void add(const ConstMatrix & from, const ggufspec::Sampling & sampling, const TokenRow & text, const Tokens & draft,
             const Tokens & parents, const std::optional<ConstMasks> & masks, bool keep) {
        const size_t n_new = from.shape(0);
        require(from.shape(1) == n_vocab, "to_probs: logits and rows differ in shape");
        require(n + n_new < rows.size(), "to_probs: more rows than there is room for, in shape");
        require(n_new <= draft.size() + 1, "to_probs: more rows than drafted tokens and one");
        require(!masks || masks->shape(0) == n_new, "to_probs: needs one mask for each row of logits");
        for (const auto & [token, bias] : sampling.logit_bias) require_tokens(&token, 1, n_vocab);
        require_tokens(draft.data(), draft.size(), n_vocab);
        require_parents(parents, draft.size());
        size_t bad_row = n_new;
        {
            Unlocked unlocked;
            const size_t n_text = text.shape(0);
            const int64_t window = sampling.window();
            const size_t n_seen = window < 0 ? n_text : std::min<size_t>(window, n_text);
            const bool has_state = sampling.has_state();
            if (has_state) states.resize(std::max(states.size(), n_new));
            thread_local Tokens seen;
            if (window != 0) {
                seen.assign(text.data() + (n_text - n_seen), text.data() + n_text);
                seen.insert(seen.end(), draft.begin(), draft.end());
            }
            for (size_t i = 0; i < n_new && bad_row == n_new; i++) {
                size_t n_path = i;
                if (window != 0 && !parents.empty()) {
                    seen.resize(n_seen);
                    for (int32_t node = int32_t(i) - 1; node >= 0; node = parents[node]) seen.push_back(draft[node]);
                    std::reverse(seen.begin() + n_seen, seen.end());
                    n_path = seen.size() - n_seen;
                }
                ggufspec::Text before{seen.data(), window != 0 ? n_seen + n_path : 0};
                if (has_state) before.state = states[i] = state_of(i, sampling, draft, parents);
                if (i == 0 && sampling.state) before.banned = banned_after(n_text, *sampling.state);
                ggufspec::Mask mask{};
                if (masks) mask = {masks->data() + i * masks->shape(1), masks->shape(1)};
                if (rows[n + i].set(from.data() + i * n_vocab, n_vocab, sampling, before, masks ? &mask : nullptr, keep))
                    continue;
                // After a drafted token that is not allowed nothing can be drawn; an error only if it is accepted.
                if (masks && i > 0) rows[n + i] = ggufspec::Row::certain(-1);
                else bad_row = i;
            }
        }
        require(bad_row == n_new,
                masks ? "a row has no token that the constraint allows" : "a row has no finite logit to draw from");
        n += n_new;
    }

    // The state before the token of new row i, from the rows of the path to it.
    ggufspec::State state_of(size_t i, const ggufspec::Sampling & sampling, const Tokens & draft, const Tokens & parents) const {
        const bool is_begun = sampling.state && !sampling.state->states.empty();
        if (i == 0) return is_begun ? sampling.state->states.back() : sampling.first_state();
        const size_t parent = parents.empty() ? i - 1 : parents[i - 1] + 1;
        return state_after(states[parent], rows[n + parent], sampling, draft[i - 1]);
    }

    static ggufspec::State state_after(const ggufspec::State & state, const ggufspec::Row & row, const ggufspec::Sampling & sampling,
                                       int32_t token) {
        return sampling.next_state(state, row.observed(sampling, token, sampling.coin(state)));
    }

    static const Tokens * banned_after(size_t n_tokens, const ggufspec::TextState & state) {
        const auto found = state.bans.find(n_tokens);
        return found == state.bans.end() ? nullptr : &found->second;
    }

    // Moves the state of the sampling on: `nodes` of the draft were accepted, and `token` follows them.
    void advance(const ggufspec::Sampling & sampling, const Tokens & nodes, int32_t token) const {
        if (!sampling.has_state()) return;
        require(sampling.state != nullptr, "advance: the sampling has no state of a text");
        require_tokens(&token, 1, n_vocab);
        size_t last = 0;
        for (int32_t node : nodes) {
            last = size_t(node) + 1;
            require(node >= 0 && last < n && last < states.size(), "advance: there is no row of that node");
            sampling.state->states.push_back(states[last]);
        }
        sampling.state->states.push_back(state_after(states[last], rows[last], sampling, token));
    }

    // The row of a token that was drafted without a choice.
    void add_certain(int32_t token) {
        require_tokens(&token, 1, n_vocab);
        added() = ggufspec::Row::certain(token);
    }

    void add_weights(const ConstMatrix & weights) {
        require(weights.shape(1) == n_vocab && n + weights.shape(0) < rows.size(), "Rows: weights and rows differ in shape");
        for (size_t i = 0; i < weights.shape(0); i++) {
            require(rows[n + i].set_weights(weights.data() + i * n_vocab, n_vocab), "Rows: a row has no weights to draw from");
        }
        n += weights.shape(0);
    }

    ggufspec::Row & added() {
        require(n + 1 < rows.size(), "Rows: there is no room for another row");
        return rows[n++];
    }

    // The last row is not counted any more: see has_declined.
    void decline() {
        require(n > 0, "decline: there is no row");
        std::swap(rows[--n], rows.back());
        has_declined = true;
    }

    bool add_without(size_t i, int32_t token) {
        const auto & other = at(i);
        require_tokens(&token, 1, n_vocab);
        if (added().set_without(other, token)) return true;
        n--;
        return false;
    }

    void add_from(const Rows & other, size_t i) {
        require(n_vocab == other.n_vocab, "append_from: the rows differ in shape");
        const auto & row = other.at(i);
        added().set_copy(row);
    }

    // Before sampling where the rows are those of logits in place.
    float gap(size_t i) const {
        const auto & row = at(i);
        return i < n_in_place ? ggufspec::kernels.gap_of(logits.data() + i * n_vocab, n_vocab) : row.gap();
    }
};

nb::ndarray<nb::numpy, float, nb::ndim<2>> dense(const Rows & self) {
    auto * probs = new float[self.n * self.n_vocab]();
    nb::capsule owner(probs, [](void * p) noexcept { delete[] static_cast<float *>(p); });
    for (size_t i = 0; i < self.n; i++) self.rows[i].write(probs + i * self.n_vocab);
    return {probs, {self.n, self.n_vocab}, owner};
}

ggufspec::Judged judged(const Tokens & tokens, const Tokens & parents, const Rows * draft, const Rows & target,
                        const Uniforms & uniforms) {
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
template <ggufspec::Verdict (*rule)(const ggufspec::Judged &)>
std::tuple<int32_t, int32_t, std::optional<Tokens>> verdict(const Tokens & tokens, const Tokens & parents, const Rows * draft,
                                                            const Rows & target, const Uniforms & uniforms) {
    const auto found = rule(judged(tokens, parents, draft, target, uniforms));
    if (parents.empty()) return {found.node + 1, found.next_token, std::nullopt};
    Tokens path;
    for (int32_t node = found.node; node >= 0; node = parents[node]) path.push_back(node);
    std::reverse(path.begin(), path.end());
    return {int32_t(path.size()), found.next_token, std::move(path)};
}

template <typename Function>
Function borrowed(uintptr_t address) {
    require(address != 0, "Context: a borrowed address is null");
    return reinterpret_cast<Function>(address);
}

void make_context(ggufspec::Context * self, uintptr_t context, uintptr_t memory, size_t n_batch, size_t n_sequences,
                  size_t n_leaves, size_t n_hidden, bool hidden_is_alone, size_t n_rollback, bool shares_cells,
                  uintptr_t llama_decode, uintptr_t llama_synchronize, uintptr_t llama_get_logits_ith,
                  uintptr_t llama_memory_seq_rm, uintptr_t llama_memory_seq_cp, uintptr_t llama_memory_seq_pos_max,
                  uintptr_t llama_set_abort_callback) {
    require(n_sequences >= 1 && n_leaves >= 1, "Context: needs at least one sequence, and one leaf");
    const ggufspec::Functions functions{
        borrowed<decltype(ggufspec::Functions::decode)>(llama_decode),
        borrowed<decltype(ggufspec::Functions::synchronize)>(llama_synchronize),
        borrowed<decltype(ggufspec::Functions::get_logits_ith)>(llama_get_logits_ith),
        borrowed<decltype(ggufspec::Functions::seq_rm)>(llama_memory_seq_rm),
        borrowed<decltype(ggufspec::Functions::seq_cp)>(llama_memory_seq_cp),
        borrowed<decltype(ggufspec::Functions::seq_pos_max)>(llama_memory_seq_pos_max),
        borrowed<decltype(ggufspec::Functions::set_abort_callback)>(llama_set_abort_callback),
    };
    new (self) ggufspec::Context(functions, borrowed<void *>(context), borrowed<void *>(memory), n_batch, n_sequences, n_leaves,
                                 n_hidden, hidden_is_alone, n_rollback, shares_cells);
}

void require_sequence(const ggufspec::Context & self, size_t sequence) {
    require(sequence < self.n_sequences(), "the context has no such sequence");
}

size_t n_common(const ggufspec::Context & self, TokenRow tokens, size_t sequence) {
    require_sequence(self, sequence);
    return self.n_common(sequence, tokens.data(), tokens.shape(0));
}

int32_t resume(ggufspec::Context & self, TokenRow tokens, size_t n_most, size_t sequence) {
    require_sequence(self, sequence);
    require(n_most <= tokens.shape(0), "resume: more tokens to keep than there are");
    return self.resume(sequence, tokens.data(), n_most);
}

void copy_prefix(ggufspec::Context & self, size_t source, size_t sequence, TokenRow tokens) {
    require_sequence(self, source);
    require_sequence(self, sequence);
    require(source != sequence, "copy_prefix: a sequence has its own prefix already");
    self.copy_prefix(source, sequence, tokens.data(), tokens.shape(0));
}

void drop_middle(ggufspec::Context & self, size_t n_first, size_t n_dropped, size_t sequence) {
    require_sequence(self, sequence);
    self.drop_middle(sequence, n_first, n_dropped);
}

void begin_restore(ggufspec::Context & self, size_t n_tokens, size_t sequence) {
    require_sequence(self, sequence);
    self.begin_restore(sequence, n_tokens);
}

void end_restore(ggufspec::Context & self, size_t sequence) {
    require_sequence(self, sequence);
    self.end_restore(sequence);
}

bool drop_tail(ggufspec::Context & self, size_t n_tokens, size_t sequence) {
    require_sequence(self, sequence);
    return self.truncate(sequence, n_tokens);
}

size_t n_cells(const ggufspec::Context & self, size_t sequence) {
    require_sequence(self, sequence);
    return self.n_cells(sequence);
}

// Runs the batch without the GIL. In the main thread, signal handlers of Python run within it; what one raises ends it.
template <typename Add, typename Run> int32_t run_batch(ggufspec::Context & self, const Add & add, const Run & run) {
    Unlocked::check();
    std::exception_ptr raised;
    const std::function<bool()> is_interrupted = Unlocked::interrupt(raised);
    int32_t result;
    {
        Unlocked unlocked;
        self.begin();
        add();
        result = run(is_interrupted);
    }
    if (raised) std::rethrow_exception(raised);
    Unlocked::check();
    return result;
}

template <typename Add> int32_t run_batch(ggufspec::Context & self, const Add & add) {
    return run_batch(self, add, [&self](const std::function<bool()> & is_interrupted) { return self.run(is_interrupted); });
}

size_t n_leaves_of(const Tokens & parents) {
    std::vector<bool> is_leaf(parents.size(), true);
    for (int32_t parent : parents) {
        if (parent >= 0) is_leaf[parent] = false;
    }
    return std::count(is_leaf.begin(), is_leaf.end(), true);
}

using Parts = std::vector<std::tuple<size_t, Tokens, size_t, Tokens>>;

void require_parts(const ggufspec::Context & self, const Parts & parts) {
    size_t n_tokens = 0;
    std::vector<bool> is_there(self.n_sequences());
    for (const auto & [sequence, tokens, n_rows, parents] : parts) {
        require_sequence(self, sequence);
        require(!is_there[sequence], "decode: a sequence comes twice");
        is_there[sequence] = true;
        require(!tokens.empty() && n_rows <= tokens.size(), "decode: no tokens, or more rows than tokens");
        require(parents.empty() || n_rows == parents.size() + 1, "decode: a tree needs a row for each node, and one before it");
        require_parents(parents, parents.size());
        require(n_leaves_of(parents) <= self.n_leaves(), "decode: the tree has more leaves than the context reads (n_leaves)");
        n_tokens += tokens.size();
    }
    require(n_tokens >= 1 && n_tokens <= self.n_batch(), "decode: needs 1 to n_batch tokens");
}

void add_parts(ggufspec::Context & self, const Parts & parts) {
    for (const auto & [sequence, tokens, n_rows, parents] : parts) {
        self.add(sequence, tokens.data(), tokens.size(), n_rows, nullptr, parents.data(), parents.size());
    }
}

int32_t decode(ggufspec::Context & self, const Parts & parts) {
    require_parts(self, parts);
    return run_batch(self, [&] { add_parts(self, parts); });
}

std::pair<int32_t, int32_t> decode_beside(ggufspec::Context & self, const Parts & parts, ggufspec::Context & other,
                                          const Parts & others) {
    require(&self != &other, "decode_beside: needs another context");
    require_parts(self, parts);
    require_parts(other, others);
    std::pair<int32_t, int32_t> results;
    run_batch(
        self, [&] { add_parts(self, parts); },
        [&](const std::function<bool()> & is_interrupted) {
            other.begin();
            add_parts(other, others);
            results = ggufspec::run_beside(self, other, is_interrupted);
            return results.first;
        });
    return results;
}

int32_t decode_hidden(ggufspec::Context & self, size_t sequence, TokenRow tokens, ConstMatrix hidden, size_t n_rows) {
    require_sequence(self, sequence);
    const size_t n = tokens.shape(0);
    require(n >= 1 && n <= self.n_batch() && n_rows <= n, "decode_hidden: needs 1 to n_batch tokens, and at most as many rows");
    require(hidden.shape(0) == n && hidden.shape(1) == self.n_hidden(), "decode_hidden: needs n_hidden numbers for each token");
    return run_batch(self, [&] { self.add(sequence, tokens.data(), n, n_rows, hidden.data()); });
}

void require_places(size_t n) { require(n < std::numeric_limits<int32_t>::max(), "the texts of an index are too long together"); }

size_t update(ggufspec::Ngrams & self, TokenRow tokens) {
    require_places(tokens.shape(0));
    return self.update(tokens.data(), tokens.shape(0));
}

void add_text(ggufspec::SortedTexts & self, TokenRow tokens) {
    require_places(self.tokens().size() + tokens.shape(0));
    self.add(tokens.data(), tokens.shape(0));
}

void make_ngrams(ggufspec::Ngrams * self, const std::vector<std::tuple<size_t, double, double, double, double>> & priors,
                 double prior_weight, const std::shared_ptr<ggufspec::SortedTexts> & prediction,
                 const std::vector<std::shared_ptr<ggufspec::SortedTexts>> & others) {
    std::vector<ggufspec::NgramAcceptance::Prior> made;
    for (const auto & [min_length, own, own_contested, other, other_contested] : priors) {
        const bool rises = made.empty() ? min_length == 1 : min_length > made.back().min_length;
        require(rises, "Ngrams: needs priors by rising match length, from 1 on");
        for (double p : {own, own_contested, other, other_contested})
            require(p > 0 && p < 1, "Ngrams: a prior must be between 0 and 1");
        made.push_back({min_length, {own, own_contested, other, other_contested}});
    }
    require(!made.empty() && prior_weight > 0, "Ngrams: needs priors with a weight above 0");
    for (const auto & each : others) require(each != nullptr, "Ngrams: one of the other texts is None");
    new (self) ggufspec::Ngrams(ggufspec::NgramAcceptance(made, prior_weight), prediction, {others.begin(), others.end()});
}

std::tuple<Tokens, std::vector<double>, Tokens, std::vector<double>, int> predict(ggufspec::Ngrams & self, size_t n_most) {
    auto found = self.predict(n_most);
    auto probabilities = self.probabilities(found);
    return {std::move(found.tokens), std::move(probabilities), std::move(found.lengths), std::move(found.shares),
            int(found.origin)};
}

void observe(ggufspec::Ngrams & self, size_t n_accepted, size_t n_tried) {
    require(n_tried <= self.n_predicted(), "observe: the last prediction has fewer tokens");
    require(n_accepted <= n_tried, "observe: more tokens accepted than tried");
    self.observe(n_accepted, n_tried);
}

ConstMatrix rows_at(uintptr_t address, size_t n_rows, size_t n_vocab) {
    require(address != 0, "rows_at: there are no rows at a null address");
    return ConstMatrix(reinterpret_cast<const float *>(address), {n_rows, n_vocab}, nb::handle());
}

}  // namespace

NB_MODULE(_native, m) {
    Unlocked::start(nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident")));
    nb::module_::import_("atexit").attr("register")(nb::cpp_function(&Unlocked::end));
    nb::set_leak_warnings(false);  // at the interpreter's end, threads may still hold objects
    nb::register_exception_translator([](const std::exception_ptr & thrown, void *) {
        try {
            std::rethrow_exception(thrown);
        } catch (const ggufspec::DecodeError & error) {  // imported now: the stub is made without the package
            PyErr_SetString(nb::module_::import_("ggufspec.errors").attr("DecodeError").ptr(), error.what());
        }
    });
    m.doc() = "Sampling, verification, draft length, n-grams and batches.";
    m.attr("silent_log") = reinterpret_cast<uintptr_t>(+[](int, const char *, void *) {});  // a ggml_log_callback
    m.attr("instructions") = ggufspec::kernels.instructions;  // used by the loops over rows: see kernels.h
    nb::class_<ggufspec::Breakers>(m, "Breakers", "The sequence breakers of DRY.")
        .def("__init__", &make_breakers, "breakers"_a, "breakers: (tokens that have to follow, first tokens) of each, in int32.");
    nb::class_<ggufspec::TextState>(m, "TextState", "What mirostat and adaptive_p know of a text so far, and banned tokens.")
        .def(
            "__init__", [](ggufspec::TextState * made, uint64_t seed) { new (made) ggufspec::TextState{seed, {}, {}}; }, "seed"_a = 0,
            "seed: of what adaptive_p cannot know from the text: in which case of XTC a token was drawn.")
        .def_prop_ro("has_bans", [](const ggufspec::TextState & self) { return !self.bans.empty(); }, "Whether a token is banned.")
        .def("__copy__", [](const ggufspec::TextState & self) { return ggufspec::TextState(self); })
        .def(
            "rewind",
            [](ggufspec::TextState & self, size_t n_dropped, size_t n_tokens, int32_t token) {
                self.states.resize(self.states.size() - std::min(n_dropped, self.states.size()));
                self.bans.erase(self.bans.upper_bound(n_tokens), self.bans.end());
                self.bans[n_tokens].push_back(token);
                self.seed = ggufspec::mixed(self.seed);  // what was drawn before depends on the coins that it had
            },
            "n_dropped"_a, "n_tokens"_a, "token"_a,
            "Forget the last n_dropped tokens; n_tokens are left, with the prompt. `token` may not follow them.");
    nb::class_<ggufspec::Sampling>(m, "Sampling", "How logits become a distribution.")
        .def("__init__", &make_sampling, nb::kw_only(), "samplers"_a, "numbers"_a, "dry_breakers"_a.none(), "logit_bias"_a,
             "state"_a.none(), "numbers: the numeric options by name. state: of the text; None: at the start of a text.")
        .def_prop_ro("has_state", &ggufspec::Sampling::has_state, "Whether distributions depend on the state.");
    nb::class_<Rows>(m, "Rows",
                     "Distributions over the vocabulary, at most n_most of them; numpy.asarray(rows): (n, n_vocab).\n\n"
                     "Not for two threads at once.")
        .def(nb::init<size_t, size_t>(), "n_most"_a, "n_vocab"_a)
        .def(
            "fill",
            [](Rows & self, ConstMatrix logits, const ggufspec::Sampling & sampling, TokenRow tokens, const Tokens & draft,
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
            [](Rows & self, ConstMatrix logits, const ggufspec::Sampling & sampling, TokenRow tokens,
               const std::optional<ConstMasks> & masks, ggufspec::LengthPolicy * policy, double uniform) -> int32_t {
                require(logits.shape(0) == 1, "draw: needs one row of logits");
                self.add(logits, sampling, tokens, {}, {}, masks, true);
                if (!policy || policy->should_draw(ggufspec::kernels.gap_of(logits.data(), logits.shape(1)))) {
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
            [](Rows & self, ggufspec::LengthPolicy & policy, double uniform) {
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
            return ggufspec::kernels.gap_of(logits.data(), logits.shape(1));
        },
        "logits"_a.noconvert(), "The difference of the two largest logits in the first row.");
    m.def("rows_at", &rows_at, nb::rv_policy::reference, "address"_a, "n_rows"_a, "n_vocab"_a,
          "A view of floats (n_rows, n_vocab) at an address: valid as long as the memory there is.");
    m.def(
        "n_same",
        [](const TokenRow & a, const TokenRow & b) {
            const size_t n = std::min(a.shape(0), b.shape(0));
            return size_t(std::mismatch(a.data(), a.data() + n, b.data()).first - a.data());
        },
        "a"_a.noconvert(), "b"_a.noconvert(), nb::sig("def n_same(a: object, b: object) -> int"),
        "Length of the common prefix of two arrays of int32.");
    m.def("match", &verdict<ggufspec::match>, "tokens"_a, "parents"_a, "draft"_a.none(), "target"_a, "uniforms"_a,
          "Verify by equality with the target's own draws: (n_accepted, next_token, path); path is None for a chain.");
    m.def("rejection", &verdict<ggufspec::rejection>, "tokens"_a, "parents"_a, "draft"_a.none(), "target"_a, "uniforms"_a,
          "Verify by token-wise rejection sampling; returns the same as match.");
    m.def("traversal", &verdict<ggufspec::traversal>, "tokens"_a, "parents"_a, "draft"_a.none(), "target"_a, "uniforms"_a,
          "Verify by traversal verification; returns the same as match.");
    nb::class_<ggufspec::AcceptanceModel>(m, "AcceptanceModel",
                                          "The probability that a token is accepted, by a logit gap: see native/draft_length.h.")
        .def(
            "__init__",
            [](ggufspec::AcceptanceModel * self, double intercept, double slope, double weight, double memory) {
                require(weight > 0 && memory > 1, "AcceptanceModel: weight must be above 0, memory above 1");
                new (self) ggufspec::AcceptanceModel(intercept, slope, weight, memory);
            },
            "intercept"_a = 0.0, "slope"_a = 0.0, "weight"_a = 1.0, "memory"_a = 100.0)
        .def("probability", &ggufspec::AcceptanceModel::probability, "gap"_a)
        .def("observe", &ggufspec::AcceptanceModel::observe, "gap"_a, "acceptance"_a,
             "Learn that a token with that logit gap was accepted with that probability.")
        .def_prop_ro(
            "coefficients", [](const ggufspec::AcceptanceModel & self) { return std::pair(self.intercept(), self.slope()); },
            "(intercept, slope) as learned so far.");
    nb::class_<ggufspec::CostModel>(m, "CostModel", "Seconds of passes and draft steps: see native/cost_model.h.")
        .def("__init__", &make_cost_model, "n_most"_a, "n_sharers"_a = 1, "start"_a.none() = nb::none(), "n_per_step"_a = 1,
             "n_sharers: maximum number of texts in a pass, each with at most n_most tokens. start: see Start in cost_model.py;\n"
             "None: usual CPU costs. n_per_step: tokens that the draft model predicts in one step.")
        .def("use", &ggufspec::CostModel::use, "circumstances"_a, "is_disturbed"_a = false,
             "The next measurements are of passes in these circumstances (0: the usual ones), and ignored if is_disturbed.\n\n"
             "Each number has measurements of its own, which start from those before it.")
        .def("observe_target", &ggufspec::CostModel::observe_target, "n_tokens"_a, "seconds"_a,
             "Learn that a pass over n_tokens took so many seconds, with verification.")
        .def("observe_plain", &ggufspec::CostModel::observe_plain, "seconds"_a,
             "Learn the seconds of a single-token pass after another single-token pass. After a larger batch it is slower:\n"
             "llama.cpp plans its graph again at each change of size.")
        .def("observe_draft", &ggufspec::CostModel::observe_draft, "n_steps"_a, "seconds"_a, "n_further"_a = 0,
             "Learn that n_steps draft steps in sequence took so many seconds in total.\n\n"
             "The first step also read n_further tokens besides its own.")
        .def(
            "resized",
            [](const ggufspec::CostModel & self, size_t n_most, size_t n_sharers, const nb::object & start, size_t n_per_step) {
                return self.resized(n_most, n_sharers, n_per_step, starting_costs(start));
            },
            "n_most"_a, "n_sharers"_a = 1, "start"_a.none() = nb::none(), "n_per_step"_a = 1,
            "A copy for passes of other sizes, with the measurements that fit them.")
        .def("resized_as", &ggufspec::CostModel::resized_as, "other"_a, "The same for passes of the sizes that other has.")
        .def("as_measured", &ggufspec::CostModel::as_measured,
             "A copy in which the expected seconds of all sizes, and of drafting, count as measured.")
        .def("drafting", &ggufspec::CostModel::drafting, "n_tokens"_a,
             "Seconds of the draft steps that compute n_tokens distributions.")
        .def("restore", &ggufspec::CostModel::restore, "sizes"_a, "plain"_a, "step"_a, "read"_a,
             "Replace all measurements by these seconds, as if each had been measured just now, twice; 0: not measured.")
        .def("n_measured", &ggufspec::CostModel::n_measured, "n_tokens"_a, "How many passes over n_tokens were measured.")
        .def("per_text", &ggufspec::CostModel::per_text, "n_sharers"_a,
             "Seconds attributed to 1, 2 ... n_most tokens of one text in a pass of n_sharers texts.\n\n"
             "The larger of two prices: an equal share of a pass in which all texts have that many tokens, and the price of\n"
             "adding the tokens to a pass in which every other text has one token.")
        .def_prop_ro("curve", &ggufspec::CostModel::curve,
                     "Seconds of a pass over 1, 2 ... n_most * n_sharers tokens, measured or assumed.")
        .def_prop_ro("plain", &ggufspec::CostModel::plain, "Seconds per token without drafting.")
        .def_prop_ro("step", &ggufspec::CostModel::step, "Seconds of a draft step, in which the draft model reads one token.")
        .def_prop_ro("read", &ggufspec::CostModel::read,
                     "Seconds that the draft model takes for each token that it reads in a batch.")
        .def_prop_ro("draft_cannot_pay", &ggufspec::CostModel::draft_cannot_pay,
                     "Whether drafting is slower than plain decoding even if every token is accepted.")
        .def_prop_ro("knows_draft", &ggufspec::CostModel::knows_draft, "Whether a draft step was measured.")
        .def_prop_ro("sizes", &ggufspec::CostModel::sizes, "Measured seconds of passes, by number of tokens.")
        .def_prop_ro("plain_measured", &ggufspec::CostModel::plain_measured, "As observe_plain learned it; 0: not yet.")
        .def_prop_ro("step_measured", &ggufspec::CostModel::step_measured, "As observe_draft learned it; 0: not yet.")
        .def_prop_ro("read_measured", &ggufspec::CostModel::read_measured, "As observe_draft learned it; 0: not yet.")
        .def_prop_ro("n_most", &ggufspec::CostModel::n_most, "Maximum tokens of a text in a pass.")
        .def_prop_ro("n_sharers", &ggufspec::CostModel::n_sharers, "Maximum number of texts in a pass.")
        .def_prop_ro("n_per_step", &ggufspec::CostModel::n_per_step, "Tokens that the draft model predicts in one step.")
        .def_prop_ro("n_passes", &ggufspec::CostModel::n_passes, "Number of measured passes.")
        .def_rw("balance", &ggufspec::CostModel::balance, "What drafts have saved, less what they have lost, in plain passes.")
        .def_rw("is_frozen", &ggufspec::CostModel::is_frozen, "If so, measurements are ignored.");
    nb::enum_<ggufspec::Action>(m, "Action", "What to draft in a round.")
        .value("DRAFT", ggufspec::Action::draft, "Run the draft model.")
        .value("SKIP", ggufspec::Action::skip, "Do not run it; drafts that exist already may be used.")
        .value("PLAIN", ggufspec::Action::plain, "Draft nothing at all.");
    nb::class_<ggufspec::PrefixLength>(m, "PrefixLength", "How many tokens of an existing draft to verify.")
        .def_ro("n_draft", &ggufspec::PrefixLength::n_draft)
        .def_ro("expected", &ggufspec::PrefixLength::expected, "Expected number of accepted tokens.")
        .def_ro("beats_model", &ggufspec::PrefixLength::beats_model,
                "After the forced tokens, it has a higher expected gain than drafting with the draft model.");
    nb::class_<ggufspec::LengthPolicy>(m, "LengthPolicy", "How far to draft in each round of a text: see native/draft_length.h.")
        .def(
            "__init__",
            [](ggufspec::LengthPolicy * self, std::shared_ptr<ggufspec::CostModel> costs, ggufspec::Coefficients prior,
               ggufspec::Coefficients known, double block_bonus, bool has_model) {
                new (self) ggufspec::LengthPolicy(constants(), std::move(costs), prior, known, block_bonus, has_model);
            },
            "costs"_a.none(), "prior"_a, "known"_a, "block_bonus"_a, "has_model"_a)
        .def("begin_text", &ggufspec::LengthPolicy::begin_text, "n_unread"_a, "n_most"_a,
             "Begin a text of at most n_most tokens, of whose prompt the draft model has not read n_unread tokens.\n\n"
             "Returns whether it should read them before the first round. If not, it does so once that pays.")
        .def("set_n_sharers", &ggufspec::LengthPolicy::set_n_sharers, "n_sharers"_a,
             "Expect the next target pass to be shared by n_sharers texts.")
        .def(
            "start_round",
            [](ggufspec::LengthPolicy & self, size_t n_max, size_t n_unread) {
                require(n_unread > 0, "start_round: the last token is always unread");
                return self.start_round(n_max, n_unread);
            },
            "n_max"_a, "n_unread"_a,
            "Start a round of at most n_max drafted tokens; the draft model has not read n_unread tokens.")
        .def("prefix_length", &ggufspec::LengthPolicy::prefix_length, "probs"_a, "forced"_a = std::vector<double>(),
             nb::kw_only(), "is_own"_a = true,
             "How many tokens to use of an n-gram match with acceptance probabilities `probs`, after forced tokens with "
             "`forced`.\n\n"
             "is_own: False for matches in other texts.")
        .def("take", &ggufspec::LengthPolicy::take, "probs"_a,
             "Add tokens that cost no draft step, with these acceptance probabilities. Returns how many of them to draft.")
        .def("foresee", &ggufspec::LengthPolicy::foresee, "gaps"_a,
             "Choose how many tokens to draw, given the logit gaps of the next distributions.")
        .def("should_evaluate", &ggufspec::LengthPolicy::should_evaluate,
             "Whether to run the draft model for the next distribution.")
        .def("should_draw", &ggufspec::LengthPolicy::should_draw, "gap"_a,
             "Whether to draw a token from a distribution with that logit gap.")
        .def("n_worth", &ggufspec::LengthPolicy::n_worth, "values"_a, "n_drafted"_a,
             "How many further tokens, accepted with these probabilities (falling), pay for their passes.")
        .def("step_price", &ggufspec::LengthPolicy::step_price, "n_read"_a,
             "Price of a draft step for a branch, in tokens; n_read: further tokens to read.")
        .def("observe_growth", &ggufspec::LengthPolicy::observe_growth, "value"_a, "n_steps"_a, "n_read"_a,
             "Note that branches were added: their expected accepted nodes, draft steps, and further tokens read.")
        .def("observe_gaps", &ggufspec::LengthPolicy::observe_gaps, "gaps"_a,
             "Learn the target's logit gaps at the tokens that a round has added.")
        .def("observe_verdict", &ggufspec::LengthPolicy::observe_verdict, "n_accepted"_a, "acceptances"_a,
             "Learn the acceptance probabilities of the first n_accepted + 1 distributions of the draft model; empty: unknown.")
        .def("observe_seconds", &ggufspec::LengthPolicy::observe_round, "n_tokens"_a, "n_drafted"_a, "n_sharers"_a,
             "draft_seconds"_a, "target_seconds"_a, "Learn what a round cost: see observe_round in draft_length.py.")
        .def("give_up_model", &ggufspec::LengthPolicy::give_up_model, "Draft without the draft model for the rest of the text.")
        .def_prop_ro("n_reachable", &ggufspec::LengthPolicy::n_reachable,
                     "Maximum length of this round's draft if all its tokens are likely.")
        .def_prop_ro("n_max", &ggufspec::LengthPolicy::n_max, "Maximum length of this round's draft.")
        .def_prop_ro("n_drawn", &ggufspec::LengthPolicy::n_drawn, "Tokens drawn in this round.")
        .def_prop_ro("n_taken", &ggufspec::LengthPolicy::n_taken, "Tokens of this round that cost no draft step.")
        .def_prop_ro("n_evaluated", &ggufspec::LengthPolicy::n_evaluated, "Distributions computed in this round.")
        .def_prop_ro("reached", &ggufspec::LengthPolicy::reached,
                     "The probability that all tokens drawn in this round are accepted.")
        .def_prop_ro("n_expected", &ggufspec::LengthPolicy::expected, "Expected number of accepted tokens of this round.")
        .def_prop_ro("gaps", &ggufspec::LengthPolicy::gaps, "The logit gaps of this round's distributions.")
        .def_prop_ro(
            "stop", [](const ggufspec::LengthPolicy & self) { return int(self.stop()); },
            "Why the draft was not longer: an index of STOP_REASONS in draft_length.py.")
        .def_rw("least", &ggufspec::LengthPolicy::least,
                "Tokens that are accepted with a lower probability are not drawn; reset by each round.")
        .def_ro("block_bonus", &ggufspec::LengthPolicy::block_bonus, "See best_rule in native/stopping_rule.h.")
        .def_ro("has_model", &ggufspec::LengthPolicy::has_model, "Whether there is a draft model.")
        .def_prop_ro("is_fixed", &ggufspec::LengthPolicy::is_fixed, "Whether the length is fixed: costs are not weighed.")
        .def_prop_ro("costs", &ggufspec::LengthPolicy::costs, "None: the length is fixed.")
        .def_prop_ro(
            "rate", [](const ggufspec::LengthPolicy & self) { return self.rule().rate; },
            "Tokens per second by the rule; 0 before the first round.")
        .def_prop_ro("acceptance", &ggufspec::LengthPolicy::acceptance, "The acceptance model as learned so far.")
        .def_prop_ro("mean_acceptance", &ggufspec::LengthPolicy::mean_acceptance,
                     "Probability that the draft model's next token is accepted.")
        .def_prop_ro("mean_observed", &ggufspec::LengthPolicy::mean_observed, "Mean of observed acceptances; -1: there are none.")
        .def_prop_ro("n_prompt_unread", &ggufspec::LengthPolicy::n_prompt_unread,
                     "Prompt tokens that the draft model had not read when the text began; 0: it has by now.")
        .def_prop_ro("n_rounds", &ggufspec::LengthPolicy::n_rounds, "Rounds of the text.")
        .def_prop_ro("n_without_gain", &ggufspec::LengthPolicy::n_without_gain,
                     "Rounds in which drafting would not have been faster.");
    m.def(
        "best_rule",
        [](const std::vector<double> & curve, double step, const std::vector<double> & probabilities, double min_rate,
           double block_bonus) {
            require(!curve.empty() && curve[0] > 0 && !probabilities.empty(),
                    "best_rule: needs costs above 0, and probabilities");
            const auto rule = ggufspec::best_rule(curve, step, probabilities, 0, min_rate, block_bonus);
            return std::make_tuple(rule.evaluate_from, rule.draw_from, rule.tokens, rule.seconds);
        },
        "curve"_a, "step"_a, "probabilities"_a, "min_rate"_a = 0.0, "block_bonus"_a = 0.0,
        "(evaluate_from, draw_from, tokens, seconds): see native/stopping_rule.h.");
    nb::class_<ggufspec::Context>(m, "Context",
                                  "A llama.cpp context, used through borrowed addresses. Sequences are numbered from 0.")
        .def("__init__", &make_context, "context"_a, "memory"_a, "n_batch"_a, "n_sequences"_a = 1, "n_leaves"_a = 1,
             "n_hidden"_a = 0, "hidden_is_alone"_a = false, "n_rollback"_a = 0, "shares_cells"_a = false, nb::kw_only(),
             "llama_decode"_a, "llama_synchronize"_a, "llama_get_logits_ith"_a, "llama_memory_seq_rm"_a, "llama_memory_seq_cp"_a,
             "llama_memory_seq_pos_max"_a, "llama_set_abort_callback"_a)
        .def("n_common", &n_common, "tokens"_a.noconvert(), "sequence"_a = 0,
             "The length of the longest common prefix of the held tokens and tokens.")
        .def("resume", &resume, "tokens"_a.noconvert(), "n_most"_a, "sequence"_a = 0,
             "Truncate to the common prefix with the first n_most of tokens. Returns the number of tokens that remain, or -1 if "
             "a\n"
             "tail cannot be dropped.")
        .def(
            "decode", &decode, "parts"_a,
            "Evaluate parts (sequence, tokens, n_rows, parents) in one batch: for each, the tokens after those that are held.\n\n"
            "Keeps logits of the last n_rows of each part; returns llama_decode's code. parents: for a tree at the end of the\n"
            "tokens, the parent of each node, -1 for the token before the tree; empty for a chain.\n\n"
            "On a CPU, an exception of a signal handler ends a long batch; none of the tokens is then held.")
        .def("decode_beside", &decode_beside, "parts"_a, "other"_a, "parts_of_other"_a,
             "decode, and at the same time decode in another context, in another thread; returns both codes.\n\n"
             "An exception of a signal handler ends both.")
        .def("decode_hidden", &decode_hidden, "sequence"_a, "tokens"_a.noconvert(), "hidden"_a.noconvert(), "n_rows"_a,
             "decode for one sequence, with a hidden state (n_tokens, n_hidden) for each token, or instead of the tokens.")
        .def("copy_prefix", &copy_prefix, "source"_a, "sequence"_a, "tokens"_a.noconvert(),
             "Replace a sequence by the longest prefix of tokens that source holds.")
        .def("drop_middle", &drop_middle, "n_first"_a, "n_dropped"_a, "sequence"_a = 0,
             "Drop n_dropped tokens after the first n_first; the tokens after them keep their positions.")
        .def("begin_restore", &begin_restore, "n_tokens"_a, "sequence"_a = 0,
             "Count tokens from position n_tokens on as not held, before a checkpoint of that length is restored.")
        .def("end_restore", &end_restore, "sequence"_a = 0, "Note that the checkpoint has been restored.")
        .def("n_cells", &n_cells, "sequence"_a = 0, "Number of tokens that the sequence holds.")
        .def(
            "cells",
            [](const ggufspec::Context & self, size_t sequence) {
                require_sequence(self, sequence);
                return self.cells(sequence);
            },
            "sequence"_a = 0, "The tokens that the sequence holds.")
        .def(
            "hold",
            [](ggufspec::Context & self, TokenRow tokens, size_t sequence) {
                require_sequence(self, sequence);
                self.hold(sequence, tokens.data(), tokens.shape(0));
            },
            "tokens"_a.noconvert(), "sequence"_a = 0,
            "Note that llama.cpp has filled an empty sequence with the cells of these tokens.")
        .def(
            "logits", [](const ggufspec::Context & self, int32_t i) { return reinterpret_cast<uintptr_t>(self.logits(i)); },
            "i"_a, "Address of the logits of token i of the last batch; 0 if llama.cpp did not keep them.")
        .def("truncate", &drop_tail, "n_tokens"_a, "sequence"_a = 0,
             "Drop the tokens from position n_tokens on; returns False if a tail cannot be dropped.")
        .def_prop_rw("is_stopped", &ggufspec::Context::is_stopped, &ggufspec::Context::stop,
                     "From any thread: true ends the batch in progress (on CPUs) and later ones, with code 2.")
        .def_rw("uses_attention", &ggufspec::Context::uses_attention,
                "Whether batches use the attention kernels, where there is code for a model's attention; at first, false.")
        .def_prop_ro("has_own_attention", &ggufspec::Context::has_own_attention,
                     "Whether the kernels computed all attention of the last batch.")
        .def_prop_ro("decode_seconds", &ggufspec::Context::decode_seconds, "Wall time inside llama_decode so far.");
    nb::class_<ggufspec::SortedTexts>(m, "SortedTexts",
                                      "Texts with an index for Ngrams: 8 bytes per token. Not for two threads at once.")
        .def(nb::init<>())
        .def("add", &add_text, "tokens"_a.noconvert(), "Add a text (n,).")
        .def("drop", &ggufspec::SortedTexts::drop, "n_most"_a,
             "Remove whole texts, the oldest first, until at most n_most tokens are left, counting one more for each text.")
        .def("__len__", [](const ggufspec::SortedTexts & self) { return self.tokens().size(); });
    nb::class_<ggufspec::Ngrams>(
        m, "Ngrams",
        "Predicts how a text continues from what followed the same tokens earlier in it, or in others.\n\n"
        "Not for two threads at once.")
        .def("__init__", &make_ngrams, "priors"_a, "prior_weight"_a, "prediction"_a = nb::none(),
             "others"_a = std::vector<std::shared_ptr<ggufspec::SortedTexts>>(),
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
        .def_prop_ro("n_compared", &ggufspec::Ngrams::n_compared, "Number of earlier occurrences compared so far.");
    ggufspec::matmul::bind(m);
}
