#include "context.h"

#include "attention/backend.h"
#include "images.h"

#include <algorithm>
#include <atomic>
#include <future>
#include <numeric>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

namespace ggufspec {

namespace {

constexpr std::chrono::milliseconds kCheckInterval{100};
constexpr size_t kPositions = 4;  // M-RoPE's positions for each row of a batch without tokens
constexpr size_t kNodesPerClock = 8;  // reading the clock at each node took 3 % of a pass of a 1.5 M draft

}  // namespace

Context::Context(Functions functions, void * context, void * memory, size_t n_batch, size_t n_sequences, size_t n_leaves,
                 size_t n_hidden, bool are_alone, size_t n_rollback, bool shares_cells)
    : functions_(functions),
      context_(context),
      memory_(memory),
      n_leaves_(n_leaves),
      n_rollback_(n_rollback),
      shares_cells_(shares_cells),
      held_(n_sequences),
      tokens_(n_batch),
      positions_(are_alone ? kPositions * n_batch : n_batch),
      n_sequences_(n_batch, 1),
      texts_(n_batch),
      sequences_(n_batch),
      wanted_(n_batch),
      n_hidden_(n_hidden),
      are_alone_(are_alone),
      hidden_(n_batch * n_hidden) {
    int32_t id = 0;
    for (Held & held : held_) held.id = id++;
    for (Held & held : held_) {
        for (size_t i = 1; i < n_leaves; i++) held.branches.push_back({id++});
    }
    functions_.set_abort_callback(context_, &Context::aborts, this);
}

int32_t Context::position(const Held & held, size_t i) const {
    const auto at = static_cast<int32_t>(i < held.n_first ? i : i + held.n_gap);
    return has_images ? at - images::n_saved(held.cells.data(), std::min(i, held.cells.size())) : at;
}

bool Context::aborts(void * self) {
    Context & context = *static_cast<Context *>(self);
    if (context.is_stopped_.load(std::memory_order_relaxed)) return true;
    if (!context.is_interrupted_ || ++context.n_nodes_ % kNodesPerClock != 0) return false;
    if (Clock::now() < context.next_check_) return false;
    const bool stops = context.is_interrupted_();
    context.next_check_ = Clock::now() + kCheckInterval;
    return stops;
}

std::vector<int32_t> Context::Tree::path(const std::vector<int32_t> & cells, const int32_t * text, size_t n_most) const {
    std::vector<int32_t> found;
    if (!is_there() || n_most < n_before || !std::equal(text, text + n_before, cells.begin())) return found;
    int32_t last = -1;
    for (size_t i = 0; i < parents.size() && n_before + found.size() < n_most; i++) {
        if (parents[i] != last || tokens[i] != text[n_before + found.size()]) continue;
        last = static_cast<int32_t>(i);
        found.push_back(last);
    }
    return found;
}

size_t Context::n_common(size_t sequence, const int32_t * tokens, size_t n_most) const {
    const Held & held = held_[sequence];
    const size_t n = std::min(n_most, held.cells.size());
    const size_t n_first = std::mismatch(tokens, tokens + n, held.cells.begin()).first - tokens;
    const size_t n_path = held.tree.path(held.cells, tokens, n_most).size();
    return n_path == 0 ? images::whole(tokens, n_first) : held.tree.n_before + n_path;
}

int32_t Context::resume(size_t sequence, const int32_t * tokens, size_t n_most) {
    Held & held = held_[sequence];
    if (held.tree.is_there()) choose_path(held, tokens, n_most);
    const size_t n = n_common(sequence, tokens, n_most);
    if (!held.is_clean || n != held.cells.size()) return truncate(sequence, n) ? static_cast<int32_t>(n) : -1;
    cut_branches(held, n);
    return static_cast<int32_t>(n);
}

void Context::choose_path(Held & held, const int32_t * tokens, size_t n_most) {
    const Tree tree = std::exchange(held.tree, {});
    const std::vector<int32_t> path = tree.path(held.cells, tokens, n_most);
    const auto is_first = [&](int32_t node) { return tree.branches[node] < 0; };
    const size_t n_first = std::find_if_not(path.begin(), path.end(), is_first) - path.begin();
    if (n_first < path.size()) {
        const Branch & branch = held.branches[tree.branches[path.back()]];
        const size_t n_kept = tree.n_before + n_first;
        const int32_t start = position(held, n_kept), end = position(held, tree.n_before + path.size());
        held.is_clean = functions_.seq_rm(memory_, held.id, start, -1) && held.is_clean;
        functions_.seq_cp(memory_, branch.id, held.id, start, end);
        held.cells.resize(n_kept);
        for (size_t i = n_first; i < path.size(); i++) held.cells.push_back(tree.tokens[path[i]]);
    }
    std::vector<size_t> n_accepted(tree.parents.size());  // for each node: number of accepted nodes up to it
    for (size_t i = 0, n = 0; i < n_accepted.size(); i++) {
        const bool is_accepted = n < path.size() && path[n] == static_cast<int32_t>(i);
        n_accepted[i] = is_accepted ? ++n : tree.parents[i] < 0 ? 0 : n_accepted[tree.parents[i]];
    }
    for (size_t j = 0; j < tree.ends.size(); j++) held.branches[j].n_shared = tree.n_before + n_accepted[tree.ends[j]];
}

void Context::cut_branches(Held & held, size_t n_tokens) {
    for (Branch & branch : held.branches) {
        if (branch.is_clean && branch.n_shared <= n_tokens) continue;
        branch.n_shared = std::min(branch.n_shared, n_tokens);
        branch.is_clean = functions_.seq_rm(memory_, branch.id, position(held, branch.n_shared), -1);
    }
}

void Context::begin_restore(size_t sequence, size_t n_tokens) {
    Held & held = held_[sequence];
    held.cells.resize(std::min(n_tokens, held.cells.size()));
    held.is_clean = false;
    held.n_droppable = -1;
}

bool Context::truncate(size_t sequence, size_t n_tokens) {
    Held & held = held_[sequence];
    const int32_t n_kept = static_cast<int32_t>(images::whole(held.cells.data(), std::min(n_tokens, held.cells.size())));
    const int32_t n_dropped = static_cast<int32_t>(held.cells.size()) - n_kept;
    // Without this check, llama.cpp would also roll back to states that the last batch did not write.
    const bool is_kept = n_rollback_ == 0 || n_kept == 0 || n_dropped <= held.n_droppable;
    held.cells.resize(n_kept);
    held.tree = {};
    if (held.cells.size() <= held.n_first) held.n_gap = 0;
    cut_branches(held, n_kept);
    held.is_clean = is_kept && functions_.seq_rm(memory_, held.id, position(held, n_kept), -1);
    if (!held.is_clean) {
        held.n_droppable = -1;
    } else if (n_kept == 0 || n_dropped > 0) {
        held.n_droppable = 0;  // until the next batch
    }
    return held.is_clean;
}

void Context::hold(size_t sequence, const int32_t * tokens, size_t n_tokens) {
    Held & held = held_[sequence];
    held.cells.assign(tokens, tokens + n_tokens);
    held.is_clean = true;
    held.n_droppable = 0;
}

void Context::copy_prefix(size_t source, size_t sequence, const int32_t * tokens, size_t n_tokens) {
    truncate(sequence, 0);
    const Held & from = held_[source];
    Held & to = held_[sequence];
    const size_t n = std::min(n_tokens, from.cells.size());
    const size_t n_first = images::whole(tokens, std::mismatch(tokens, tokens + n, from.cells.begin()).first - tokens);
    functions_.seq_cp(memory_, from.id, to.id, 0, position(from, n_first));
    to.cells.assign(tokens, tokens + n_first);
    to.n_first = from.n_first;
    to.n_gap = n_first > from.n_first ? from.n_gap : 0;
    const std::vector<int32_t> path = from.tree.path(from.cells, tokens, n_tokens);
    const size_t n_all = from.tree.n_before + path.size();
    if (path.empty() || n_all <= n_first) return;
    const Branch & branch = from.branches[from.tree.branches[path.back()]];
    functions_.seq_cp(memory_, branch.id, to.id, position(from, n_first), position(from, n_all));
    to.cells.assign(tokens, tokens + n_all);
}

void Context::drop_middle(size_t sequence, size_t n_first, size_t n_dropped) {
    Held & held = held_[sequence];
    const size_t n_held = held.cells.size();
    const bool has_room =
        n_first < n_held && n_dropped < n_held - n_first;  // llama.cpp continues at the last position that it holds
    if (n_leaves_ > 1 || !has_room || (held.n_gap > 0 && n_first != held.n_first)) {
        throw std::invalid_argument("drop_middle: these tokens cannot be dropped");
    }
    held.n_first = n_first;
    functions_.seq_rm(memory_, held.id, position(held, n_first), position(held, n_first + n_dropped));
    const auto start = held.cells.begin() + n_first;
    held.cells.erase(start, start + n_dropped);
    held.n_gap += n_dropped;
}

void Context::begin() {
    parts_.clear();
    n_added_ = 0;
}

void Context::add(size_t sequence, const int32_t * tokens, size_t n_tokens, size_t n_rows, const float * hidden,
                  const int32_t * parents, size_t n_nodes) {
    Held & held = held_[sequence];
    if (held.tree.is_there()) truncate(sequence, held.cells.size());
    const size_t first = n_added_, end = n_added_ + n_tokens;
    std::copy(tokens, tokens + n_tokens, texts_.begin() + first);
    std::copy(tokens, tokens + n_tokens, tokens_.begin() + first);
    if (n_hidden_ > 0)
        std::replace_if(tokens_.begin() + first, tokens_.begin() + end, [](int32_t token) { return token < 0; }, 0);
    const auto hidden_first = hidden_.begin() + first * n_hidden_;
    has_hidden_ = hidden != nullptr;
    if (hidden) std::copy(hidden, hidden + n_tokens * n_hidden_, hidden_first);
    else if (!are_alone_) std::fill(hidden_first, hidden_first + n_tokens * n_hidden_, 0.0f);
    const int32_t next = shares_cells_ ? functions_.seq_pos_max(memory_, held.id) + 1 : position(held, held.cells.size());
    std::iota(positions_.begin() + first, positions_.begin() + end, next);
    std::fill(sequences_.begin() + first, sequences_.begin() + end, &held.id);
    std::fill(n_sequences_.begin() + first, n_sequences_.begin() + end, 1);
    std::fill(wanted_.begin() + first, wanted_.begin() + (end - n_rows), 0);
    std::fill(wanted_.begin() + (end - n_rows), wanted_.begin() + end, 1);
    parts_.push_back({&held, n_tokens});
    n_added_ = end;
    if (n_nodes > 0) add_tree(held, n_tokens - n_nodes, parents, n_nodes);
}

void Context::add_tree(Held & held, size_t n_lead, const int32_t * parents, size_t n_nodes) {
    const size_t first = n_added_ - n_nodes, n_cells = held.cells.size();
    Tree & tree = held.tree;
    std::vector<bool> is_leaf(n_nodes, true);
    int32_t first_leaf = -1;
    for (size_t i = 0; i < n_nodes; i++) {
        const int32_t node = static_cast<int32_t>(i), parent = parents[i];
        if (parent >= 0) is_leaf[parent] = false;
        if (parent == first_leaf) first_leaf = node;
        positions_[first + i] = parent < 0 ? position(held, n_cells + n_lead) : positions_[first + parent] + 1;
    }
    for (size_t i = 0; i < n_nodes; i++) {
        if (is_leaf[i] && static_cast<int32_t>(i) != first_leaf) tree.ends.push_back(static_cast<int32_t>(i));
    }
    if (!tree.is_there()) return;
    tree.n_before = n_cells + n_lead;
    tree.tokens.assign(tokens_.begin() + first, tokens_.begin() + n_added_);
    tree.parents.assign(parents, parents + n_nodes);
    tree.branches.assign(n_nodes, -1);
    cut_branches(held, n_cells);
    std::vector<std::vector<int32_t>> ids(n_nodes);
    const auto add_leaf = [&](int32_t leaf, int32_t id, int32_t branch) {
        held.ids.push_back(id);
        for (int32_t node = leaf; node >= 0; node = parents[node]) {
            if (ids[node].empty()) tree.branches[node] = branch;
            ids[node].push_back(id);
        }
    };
    held.ids.clear();
    add_leaf(first_leaf, held.id, -1);
    for (size_t j = 0; j < tree.ends.size(); j++) {
        Branch & branch = held.branches[j];
        add_leaf(tree.ends[j], branch.id, static_cast<int32_t>(j));
        const int32_t start = position(held, branch.n_shared);
        if (branch.n_shared < n_cells) functions_.seq_cp(memory_, held.id, branch.id, start, position(held, n_cells));
        branch.n_shared = n_cells;
        branch.is_clean = false;
    }
    const size_t n_all = held.ids.size();
    for (const std::vector<int32_t> & each : ids) held.ids.insert(held.ids.end(), each.begin(), each.end());
    int32_t * next = held.ids.data();  // stays valid: the vector does not grow any more
    std::fill(sequences_.begin() + first - n_lead, sequences_.begin() + first, next);
    std::fill(n_sequences_.begin() + first - n_lead, n_sequences_.begin() + first, static_cast<int32_t>(n_all));
    next += n_all;
    for (size_t i = 0; i < n_nodes; i++) {
        sequences_[first + i] = next;
        n_sequences_[first + i] = static_cast<int32_t>(ids[i].size());
        next += ids[i].size();
    }
}

int32_t Context::run(std::function<bool()> is_interrupted) {
    const bool has_tokens = !are_alone_ || !has_hidden_, has_hidden = are_alone_ ? has_hidden_ : n_hidden_ > 0;
    if (!has_tokens) {  // positions are stored by dimension; the last dimension is 0
        for (size_t i = n_added_; i < kPositions * n_added_; i++) positions_[i] = i < 3 * n_added_ ? positions_[i % n_added_] : 0;
    }
    const Batch batch{static_cast<int32_t>(n_added_),
                      has_tokens ? tokens_.data() : nullptr,
                      has_hidden ? hidden_.data() : nullptr,
                      positions_.data(),
                      n_sequences_.data(),
                      sequences_.data(),
                      wanted_.data()};
    for (const Part & part : parts_) {
        part.held->is_clean = false;
        part.held->n_droppable = -1;
    }
    is_interrupted_ = std::move(is_interrupted);
    std::optional<DecodeError> thrown;
    const int32_t result = compute(batch, thrown);
    is_interrupted_ = nullptr;
    const int32_t * tokens = texts_.data();
    for (const Part & part : parts_) {
        Tree & tree = part.held->tree;
        if (result != 0 || thrown) {
            tree = {};
            continue;
        }
        std::vector<int32_t> & cells = part.held->cells;
        cells.insert(cells.end(), tokens, tokens + part.n_tokens - tree.tokens.size());
        for (size_t i = 0; i < tree.tokens.size(); i++) {
            if (tree.branches[i] < 0) cells.push_back(tree.tokens[i]);
        }
        part.held->is_clean = true;
        part.held->n_droppable = static_cast<int32_t>(std::min(n_rollback_, part.n_tokens - 1));
        tokens += part.n_tokens;
    }
    if (thrown) throw *thrown;
    return result;
}

int32_t Context::compute(const Batch & batch, std::optional<DecodeError> & thrown) {
    const auto start = Clock::now();
    next_check_ = start + kCheckInterval;
    int32_t result = -1;
    const bool was = attention::use(uses_attention);
    try {
        result = is_stopped_ ? kStopped : functions_.decode(context_, batch);
        functions_.synchronize(context_);
    } catch (const std::exception & error) {
        thrown.emplace(std::string("llama.cpp could not decode a batch: ") + error.what());
    } catch (...) { thrown.emplace("llama.cpp could not decode a batch: unknown exception"); }
    has_own_attention_ = attention::computed_all();
    attention::use(was);
    seconds_ = seconds_ + std::chrono::duration<double>(Clock::now() - start).count();
    return result;
}

int32_t Context::run_image(size_t sequence, const int32_t * tokens, size_t n_tokens, const float * embeddings, size_t width,
                           const int32_t * offsets, size_t n_dimensions, std::function<bool()> is_interrupted) {
    Held & held = held_[sequence];
    if (held.tree.is_there()) truncate(sequence, held.cells.size());
    const int32_t next = position(held, held.cells.size());
    std::vector<float> values;
    std::vector<int32_t> positions;
    is_interrupted_ = std::move(is_interrupted);
    held.is_clean = false;
    held.n_droppable = -1;
    int32_t result = 0;
    std::optional<DecodeError> thrown;
    for (size_t first = 0, n = 0; first < n_tokens && result == 0 && !thrown; first += n) {
        n = std::min(n_tokens - first, tokens_.size());
        values.assign(embeddings + first * width, embeddings + (first + n) * width);
        positions.clear();
        for (size_t d = 0; d < n_dimensions; d++) {
            // M-RoPE's last dimension is unused, and 0.
            for (size_t i = first; i < first + n; i++) positions.push_back(d < 3 ? next + offsets[d * n_tokens + i] : 0);
        }
        std::fill(sequences_.begin(), sequences_.begin() + n, &held.id);
        std::fill(n_sequences_.begin(), n_sequences_.begin() + n, 1);
        std::fill(wanted_.begin(), wanted_.begin() + n, 0);
        result = compute({static_cast<int32_t>(n), nullptr, values.data(), positions.data(), n_sequences_.data(),
                          sequences_.data(), wanted_.data()},
                         thrown);
    }
    is_interrupted_ = nullptr;
    if (thrown) throw *thrown;
    if (result != 0) return result;
    held.cells.insert(held.cells.end(), tokens, tokens + n_tokens);
    held.is_clean = true;
    held.n_droppable = 0;  // an image is dropped whole, which needs a checkpoint
    return 0;
}

const float * Context::logits(int32_t i) const { return functions_.get_logits_ith(context_, i); }

std::pair<int32_t, int32_t> run_beside(Context & first, Context & second, const std::function<bool()> & is_interrupted) {
    std::atomic<bool> is_stopped{false};
    const auto stops = [&] {
        if (is_interrupted && is_interrupted()) is_stopped = true;
        return is_stopped.load();
    };
    const auto run_second = [&] { return second.run([&] { return is_stopped.load(); }); };
    std::future<int32_t> beside;
    try {
        beside = std::async(std::launch::async, run_second);
    } catch (const std::system_error &) {  // no memory for a thread: this one runs it afterwards
        beside = std::async(std::launch::deferred, run_second);
    }
    const int32_t result = first.run(stops);
    while (beside.wait_for(kCheckInterval) == std::future_status::timeout) stops();
    return {result, beside.get()};
}

}  // namespace ggufspec
