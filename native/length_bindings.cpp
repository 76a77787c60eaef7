// Python bindings: costs, and how far to draft.
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "cost_model.h"
#include "draft_length.h"

namespace ggufspec::bindings {
namespace {

Constants constants() {
    const nb::module_ module = nb::module_::import_("ggufspec.drafting.constants");
    Constants found;
#define GGUFSPEC_READ(name) found.name = nb::cast<double>(module.attr(#name));
    GGUFSPEC_CONSTANTS(GGUFSPEC_READ)
#undef GGUFSPEC_READ
    found.PRIOR_GAPS = nb::cast<std::vector<double>>(module.attr("PRIOR_GAPS"));
    return found;
}

// `start`: a Start, or None.
StartingCosts starting_costs(const nb::object & start) {
    if (start.is_none()) return {};
    return {nb::cast<std::vector<double>>(start.attr("target")), nb::cast<double>(start.attr("step")),
            nb::cast<double>(start.attr("read")), nb::cast<bool>(start.attr("is_measured")),
            nb::cast<bool>(start.attr("guesses_step"))};
}

void make_cost_model(CostModel * self, size_t n_most, size_t n_sharers, const nb::object & start, size_t n_per_step) {
    require(n_most > 0 && n_sharers > 0 && n_per_step > 0, "CostModel: needs numbers above 0");
    new (self) CostModel(constants(), n_most, n_sharers, n_per_step, starting_costs(start));
}

}  // namespace

void bind_length(nb::module_ & m) {
    nb::class_<AcceptanceModel>(m, "AcceptanceModel",
                                "The probability that a token is accepted, by a logit gap: see native/draft_length.h.")
        .def(
            "__init__",
            [](AcceptanceModel * self, double intercept, double slope, double weight) {
                require(weight > 0, "AcceptanceModel: weight must be above 0");
                new (self) AcceptanceModel(intercept, slope, weight);
            },
            "intercept"_a = 0.0, "slope"_a = 0.0, "weight"_a = 1.0)
        .def("probability", &AcceptanceModel::probability, "gap"_a)
        .def("observe", &AcceptanceModel::observe, "gap"_a, "acceptance"_a,
             "Learn that a token with that logit gap was accepted with that probability.")
        .def_prop_ro(
            "coefficients", [](const AcceptanceModel & self) { return std::pair(self.intercept(), self.slope()); },
            "(intercept, slope) as learned so far.");
    nb::class_<CostModel>(m, "CostModel", "Seconds of passes and draft steps: see native/cost_model.h.")
        .def("__init__", &make_cost_model, "n_most"_a, "n_sharers"_a = 1, "start"_a.none() = nb::none(), "n_per_step"_a = 1,
             "n_sharers: maximum number of texts in a pass, each with at most n_most tokens. start: see Start in cost_model.py;\n"
             "None: usual CPU costs. n_per_step: tokens that the draft model predicts in one step.")
        .def("use", &CostModel::use, "circumstances"_a, "is_disturbed"_a = false,
             "The next measurements are of passes in these circumstances (0: the usual ones), and ignored if is_disturbed.\n\n"
             "Each number has measurements of its own, which start from those before it.")
        .def("observe_target", &CostModel::observe_target, "n_tokens"_a, "seconds"_a,
             "Learn that a pass over n_tokens took so many seconds, with verification.")
        .def("observe_plain", &CostModel::observe_plain, "seconds"_a,
             "Learn the seconds of a single-token pass after another single-token pass. After a larger batch it is slower:\n"
             "llama.cpp plans its graph again at each change of size.")
        .def("observe_draft", &CostModel::observe_draft, "n_steps"_a, "seconds"_a, "n_further"_a = 0,
             "Learn that n_steps draft steps in sequence took so many seconds in total.\n\n"
             "The first step also read n_further tokens besides its own.")
        .def(
            "resized",
            [](const CostModel & self, size_t n_most, size_t n_sharers, const nb::object & start, size_t n_per_step) {
                return self.resized(n_most, n_sharers, n_per_step, starting_costs(start));
            },
            "n_most"_a, "n_sharers"_a = 1, "start"_a.none() = nb::none(), "n_per_step"_a = 1,
            "A copy for passes of other sizes, with the measurements that fit them.")
        .def("resized_as", &CostModel::resized_as, "other"_a, "The same for passes of the sizes that other has.")
        .def("as_measured", &CostModel::as_measured,
             "A copy in which the expected seconds of all sizes, and of drafting, count as measured.")
        .def("drafting", &CostModel::drafting, "n_tokens"_a, "Seconds of the draft steps that compute n_tokens distributions.")
        .def("restore", &CostModel::restore, "sizes"_a, "plain"_a, "step"_a, "read"_a,
             "Replace all measurements by these seconds, as if each had been measured just now, twice; 0: not measured.")
        .def("n_measured", &CostModel::n_measured, "n_tokens"_a, "How many passes over n_tokens were measured.")
        .def("per_text", &CostModel::per_text, "n_sharers"_a,
             "Seconds attributed to 1, 2 ... n_most tokens of one text in a pass of n_sharers texts.\n\n"
             "The larger of two prices: an equal share of a pass in which all texts have that many tokens, and the price of\n"
             "adding the tokens to a pass in which every other text has one token.")
        .def_prop_ro("curve", &CostModel::curve,
                     "Seconds of a pass over 1, 2 ... n_most * n_sharers tokens, measured or assumed.")
        .def_prop_ro("plain", &CostModel::plain, "Seconds per token without drafting.")
        .def_prop_ro("step", &CostModel::step, "Seconds of a draft step, in which the draft model reads one token.")
        .def_prop_ro("read", &CostModel::read, "Seconds that the draft model takes for each token that it reads in a batch.")
        .def_prop_ro("draft_cannot_pay", &CostModel::draft_cannot_pay,
                     "Whether drafting is slower than plain decoding even if every token is accepted.")
        .def_prop_ro("knows_draft", &CostModel::knows_draft, "Whether a draft step was measured.")
        .def_prop_ro("sizes", &CostModel::sizes, "Measured seconds of passes, by number of tokens.")
        .def_prop_ro("plain_measured", &CostModel::plain_measured, "As observe_plain learned it; 0: not yet.")
        .def_prop_ro("step_measured", &CostModel::step_measured, "As observe_draft learned it; 0: not yet.")
        .def_prop_ro("read_measured", &CostModel::read_measured, "As observe_draft learned it; 0: not yet.")
        .def_prop_ro("n_most", &CostModel::n_most, "Maximum tokens of a text in a pass.")
        .def_prop_ro("n_sharers", &CostModel::n_sharers, "Maximum number of texts in a pass.")
        .def_prop_ro("n_per_step", &CostModel::n_per_step, "Tokens that the draft model predicts in one step.")
        .def_prop_ro("n_passes", &CostModel::n_passes, "Number of measured passes.")
        .def_rw("balance", &CostModel::balance, "What drafts have saved, less what they have lost, in plain passes.")
        .def_rw("is_frozen", &CostModel::is_frozen, "If so, measurements are ignored.");
    nb::enum_<Action>(m, "Action", "What to draft in a round.")
        .value("DRAFT", Action::draft, "Run the draft model.")
        .value("SKIP", Action::skip, "Do not run it; drafts that exist already may be used.")
        .value("PLAIN", Action::plain, "Draft nothing at all.");
    nb::class_<PrefixLength>(m, "PrefixLength", "How many tokens of an existing draft to verify.")
        .def_ro("n_draft", &PrefixLength::n_draft)
        .def_ro("expected", &PrefixLength::expected, "Expected number of accepted tokens.")
        .def_ro("beats_model", &PrefixLength::beats_model,
                "After the forced tokens, it has a higher expected gain than drafting with the draft model.");
    nb::class_<LengthPolicy>(m, "LengthPolicy", "How far to draft in each round of a text: see native/draft_length.h.")
        .def(
            "__init__",
            [](LengthPolicy * self, std::shared_ptr<CostModel> costs, Coefficients prior, Coefficients known, double block_bonus,
               bool has_model) { new (self) LengthPolicy(constants(), std::move(costs), prior, known, block_bonus, has_model); },
            "costs"_a.none(), "prior"_a, "known"_a, "block_bonus"_a, "has_model"_a)
        .def("begin_text", &LengthPolicy::begin_text, "n_unread"_a, "n_most"_a,
             "Begin a text of at most n_most tokens, of whose prompt the draft model has not read n_unread tokens.\n\n"
             "Returns whether it should read them before the first round. If not, it does so once that pays.")
        .def("set_n_sharers", &LengthPolicy::set_n_sharers, "n_sharers"_a,
             "Expect the next target pass to be shared by n_sharers texts.")
        .def(
            "start_round",
            [](LengthPolicy & self, size_t n_max, size_t n_unread) {
                require(n_unread > 0, "start_round: the last token is always unread");
                return self.start_round(n_max, n_unread);
            },
            "n_max"_a, "n_unread"_a,
            "Start a round of at most n_max drafted tokens; the draft model has not read n_unread tokens.")
        .def("prefix_length", &LengthPolicy::prefix_length, "probs"_a, "forced"_a = std::vector<double>(), nb::kw_only(),
             "is_own"_a = true,
             "How many tokens to use of an n-gram match with acceptance probabilities `probs`, after forced tokens with "
             "`forced`.\n\n"
             "is_own: False for matches in other texts.")
        .def("take", &LengthPolicy::take, "probs"_a,
             "Add tokens that cost no draft step, with these acceptance probabilities. Returns how many of them to draft.")
        .def("foresee", &LengthPolicy::foresee, "gaps"_a,
             "Choose how many tokens to draw, given the logit gaps of the next distributions.")
        .def("should_evaluate", &LengthPolicy::should_evaluate, "Whether to run the draft model for the next distribution.")
        .def("should_draw", &LengthPolicy::should_draw, "gap"_a,
             "Whether to draw a token from a distribution with that logit gap.")
        .def("n_worth", &LengthPolicy::n_worth, "values"_a, "n_drafted"_a,
             "How many further tokens, accepted with these probabilities (falling), pay for their passes.")
        .def("step_price", &LengthPolicy::step_price, "n_read"_a,
             "Price of a draft step for a branch, in tokens; n_read: further tokens to read.")
        .def("observe_growth", &LengthPolicy::observe_growth, "value"_a, "n_steps"_a, "n_read"_a,
             "Note that branches were added: their expected accepted nodes, draft steps, and further tokens read.")
        .def("observe_gaps", &LengthPolicy::observe_gaps, "gaps"_a,
             "Learn the target's logit gaps at the tokens that a round has added.")
        .def("observe_verdict", &LengthPolicy::observe_verdict, "n_accepted"_a, "acceptances"_a,
             "Learn the acceptance probabilities of the first n_accepted + 1 distributions of the draft model; empty: unknown.")
        .def("observe_seconds", &LengthPolicy::observe_round, "n_tokens"_a, "n_drafted"_a, "n_sharers"_a, "draft_seconds"_a,
             "target_seconds"_a, "Learn what a round cost: see observe_round in draft_length.py.")
        .def("give_up_model", &LengthPolicy::give_up_model, "Draft without the draft model for the rest of the text.")
        .def_prop_ro("n_reachable", &LengthPolicy::n_reachable,
                     "Maximum length of this round's draft if all its tokens are likely.")
        .def_prop_ro("n_max", &LengthPolicy::n_max, "Maximum length of this round's draft.")
        .def_prop_ro("n_drawn", &LengthPolicy::n_drawn, "Tokens drawn in this round.")
        .def_prop_ro("n_taken", &LengthPolicy::n_taken, "Tokens of this round that cost no draft step.")
        .def_prop_ro("n_evaluated", &LengthPolicy::n_evaluated, "Distributions computed in this round.")
        .def_prop_ro("reached", &LengthPolicy::reached, "The probability that all tokens drawn in this round are accepted.")
        .def_prop_ro("n_expected", &LengthPolicy::expected, "Expected number of accepted tokens of this round.")
        .def_prop_ro("gaps", &LengthPolicy::gaps, "The logit gaps of this round's distributions.")
        .def_prop_ro(
            "stop", [](const LengthPolicy & self) { return int(self.stop()); },
            "Why the draft was not longer: an index of STOP_REASONS in draft_length.py.")
        .def_rw("least", &LengthPolicy::least,
                "Tokens that are accepted with a lower probability are not drawn; reset by each round.")
        .def_ro("block_bonus", &LengthPolicy::block_bonus, "See best_rule in native/stopping_rule.h.")
        .def_ro("has_model", &LengthPolicy::has_model, "Whether there is a draft model.")
        .def_prop_ro("is_fixed", &LengthPolicy::is_fixed, "Whether the length is fixed: costs are not weighed.")
        .def_prop_ro("costs", &LengthPolicy::costs, "None: the length is fixed.")
        .def_prop_ro(
            "rate", [](const LengthPolicy & self) { return self.rule().rate; },
            "Tokens per second by the rule; 0 before the first round.")
        .def_prop_ro("acceptance", &LengthPolicy::acceptance, "The acceptance model as learned so far.")
        .def_prop_ro("mean_acceptance", &LengthPolicy::mean_acceptance,
                     "Probability that the draft model's next token is accepted.")
        .def_prop_ro("mean_observed", &LengthPolicy::mean_observed, "Mean of observed acceptances; -1: there are none.")
        .def_prop_ro("n_prompt_unread", &LengthPolicy::n_prompt_unread,
                     "Prompt tokens that the draft model had not read when the text began; 0: it has by now.")
        .def_prop_ro("n_rounds", &LengthPolicy::n_rounds, "Rounds of the text.")
        .def_prop_ro("n_without_gain", &LengthPolicy::n_without_gain, "Rounds in which drafting would not have been faster.");
    m.def(
        "best_rule",
        [](const std::vector<double> & curve, double step, const std::vector<double> & probabilities, double min_rate,
           double block_bonus) {
            require(!curve.empty() && curve[0] > 0 && !probabilities.empty(),
                    "best_rule: needs costs above 0, and probabilities");
            const auto rule = best_rule(curve, step, probabilities, 0, min_rate, block_bonus);
            return std::make_tuple(rule.evaluate_from, rule.draw_from, rule.tokens, rule.seconds);
        },
        "curve"_a, "step"_a, "probabilities"_a, "min_rate"_a = 0.0, "block_bonus"_a = 0.0,
        "(evaluate_from, draw_from, tokens, seconds): see native/stopping_rule.h.");
}

}  // namespace ggufspec::bindings
