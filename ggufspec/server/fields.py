"""The fields of other servers and clients that are accepted without an effect, or refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

# Accepted with any value, as they do not change the text.
IGNORED = {
    "user": "identifies the user",
    "metadata": "is stored by OpenAI",
    "store": "is stored by OpenAI",
    "service_tier": "selects hardware of OpenAI",
    "safety_identifier": "identifies the user",
    "prompt_cache_key": "selects a cache of OpenAI",
    "prompt_cache_retention": "concerns a cache of OpenAI",
    "prompt_cache_options": "concerns a cache of OpenAI",
    "verbosity": "is a hint to models of OpenAI",
    "request_id": "identifies the request",
    "id_slot": "the server chooses the slot",
    "n_keep": "no text is shifted out of the context",
    "n_discard": "no text is shifted out of the context",
    "cache_prompt": "the cache does not change the text",
    "n_cache_reuse": "the cache does not change the text",
    "timings_per_token": "the last chunk has the timings",
    "return_progress": "a waiting stream gets keep-alives",
    "sse_ping_interval": "a waiting stream gets keep-alives",
    "backend_sampling": "the server decides where it samples",
    "guided_decoding_backend": "there is one backend",
    "xtc_threshold": "has no effect without xtc_probability",
    "mirostat_tau": "has no effect without mirostat",
    "mirostat_eta": "has no effect without mirostat",
    "dynatemp_exponent": "has no effect without dynatemp_range",
    "adaptive_decay": "has no effect without adaptive_target",
    "spaces_between_special_tokens": "concerns the tokenizer of vLLM",
}
IGNORED_IN_CHATS = {**IGNORED, "add_special_tokens": "the chat template writes the BOS token"}
IGNORED_IN_MESSAGES = {
    "refusal": "comes back from an earlier response",
    "annotations": "comes back from an earlier response",
    "reasoning_details": "comes back from an earlier response of OpenRouter",
    "parsed": "comes back from an earlier response",
    "provider_specific_fields": "comes back from an earlier response",
    "prefix": "a last message of the assistant is continued anyway",
    "cache_control": "controls a cache of Anthropic",
}
IGNORED_IN_CALLS = {
    "index": "comes back from a stream",
    "parsed_arguments": "comes back from an earlier response",
    "provider_specific_fields": "comes back from an earlier response",
}
IGNORED_IN_STREAM_OPTIONS = {"include_obfuscation": "responses are not padded"}
IGNORED_IN_TOOLS = {
    "cache_control": "controls a cache of Anthropic",
}
IGNORED_IN_STRUCTURED_OUTPUTS = {
    "disable_fallback": "there is one backend",
    "disable_any_whitespace": "JSON is written in one form",
}
IGNORED_IN_SCHEMAS = {"description": "describes the schema to models of OpenAI"}

_RANDOM = "has no distribution to verify drafts with"
# Refused with the reason, but for the values that are the default here.
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "xtc_probability": ((0,), _RANDOM),
    "mirostat": ((0,), _RANDOM),
    "dynatemp_range": ((0,), "is not supported"),
    "adaptive_target": ((-1,), _RANDOM),
    "min_keep": ((0, 1), "is not supported"),
    "tfs_z": ((1,), "is not supported"),
    "top_a": ((0,), "is not supported"),
    "smoothing_factor": ((0,), "is not supported"),
    "suffix": (("",), "is not supported: the text between two others is not generated"),
    "functions": (([],), "is deprecated; send 'tools'"),
    "function_call": (("none", "auto"), "is deprecated; send 'tool_choice'"),
    "modalities": ((["text"],), "is not supported: this server generates text only"),
    "audio": ((), "is not supported: this server generates text only"),
    "prediction": ((), "is not supported: the server drafts by itself"),
    "web_search_options": ((), "is not supported: the server has no access to the web"),
    "use_beam_search": ((False,), "is not supported"),
    "length_penalty": ((1,), "is not supported"),
    "early_stopping": ((False,), "is not supported"),
    "include_stop_str_in_output": ((False,), "is not supported"),
    "bad_words": (([],), "is not supported; ban tokens with 'logit_bias'"),
    "allowed_token_ids": ((), "is not supported; send a 'grammar' or 'logit_bias'"),
    "logits_processors": (([],), "is not supported"),
    "truncate_prompt_tokens": ((), "is not supported; send a shorter prompt"),
    "prompt_logprobs": ((), "is not supported; send 'echo' and 'logprobs' to /v1/completions"),
    "n_probs": ((0,), "is not supported; send 'logprobs'"),
    "post_sampling_probs": ((False,), "is not supported; 'logprobs' are those before sampling"),
    "return_token_ids": ((False,), "is not supported; send 'return_tokens'"),
    "priority": ((0,), "is not supported: requests start in the order of their arrival"),
    "t_max_predict_ms": ((0, -1), "is not supported; start the server with --timeout"),
    "lora": (([],), "is not supported"),
    "chat_template": ((), "is not supported; start the server with --chat-template-file"),
    "documents": (([],), "is a variable of the template; send it in 'chat_template_kwargs'"),
    "enable_thinking": ((), "is a variable of the template; send it in 'chat_template_kwargs'"),
    "reasoning_format": (("auto", "deepseek"), "is not supported with this value"),
    "include_reasoning": ((True,), "is not supported; reasoning is always returned"),
    "parse_tool_calls": ((True,), "is not supported"),
    "reasoning_budget_tokens": ((-1,), "is not supported"),
    "thinking_budget_tokens": ((-1,), "is not supported"),
    "continuous_usage_stats": ((False,), "is not supported"),
    "whitespace_pattern": ((), "is not supported: JSON is written in one form"),
    "guided_whitespace_pattern": ((), "is not supported: JSON is written in one form"),
    "disable_additional_properties": ((False,), "is not supported; say so in the schema"),
}
# Other names of the fields of a request, and of a message.
RENAMED = {
    "n_predict": "max_tokens",
    "n_cmpl": "n",
    "n_draft": "draft_n",
    "speculative.n_max": "draft_n",
    "typ_p": "typical_p",
}
RENAMED_IN_MESSAGES = {"reasoning": "reasoning_content"}
RENAMED_IN_TOKENIZE = {"prompt": "content", "add_special_tokens": "add_special"}  # as in vLLM


def given(
    document: Mapping[str, Any], ignored: Mapping[str, str], renamed: Mapping[str, str]
) -> dict[str, Any]:
    """The fields of an object that have an effect here: null is the same as no value.

    Raises ValueError for a field that is given by two names.
    """
    found: dict[str, Any] = {}
    for name, value in document.items():
        is_default = name in REFUSED and value in REFUSED[name][0]
        if value is None or name in ignored or is_default:
            continue
        kept = renamed.get(name, name)
        if kept in found and found[kept] != value:
            raise ValueError(f"{name} is given twice, also as {kept}; give one of them")
        found[kept] = value
    return found


def refusal(name: str, known: Collection[str]) -> str:
    """Why a field that the schema does not have is refused; `known`: fields that it has."""
    if name in REFUSED:
        return REFUSED[name][1]
    alike = get_close_matches(name, known, n=1, cutoff=0.8)
    instead = f"send {alike[0]!r}" if alike and alike[0] != name else "leave it out"
    return f"this field is unknown to the server, or not available here; {instead}"
