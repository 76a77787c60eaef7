"""Groups the options of `--help` by subject; the few that most people need come first."""

from __future__ import annotations

from itertools import chain
from typing import Final

import click

from ggufspec.decoding.sampling_options import NUMBERS

# The sections of --help in order, each with its parameters in order. An option that is not
# listed goes into the last section.
_SECTIONS: Final = {
    "Options": (
        *("preset", "target", "draft", "prompt", "prompt_file", "output", "vram", "port"),
        *("vocab", "layers", "type_", "texts"),
    ),
    "Models": ("draft_of_draft", "lora", "lora_draft", "offline", "size", "cache_dir", "alias"),
    "Prompt": ("n_prompts", "limit", "chat", "system", "chat_template"),
    "Drafting": (
        *(
            "n_draft",
            "lengths",
            "tree",
            "trees",
            "drafter",
            *("prediction", "draft_texts", "n_remembered"),
            "drafters",
            "verify",
            "rules",
        ),
        *("draft_temperature", "acceptance"),
    ),
    "Text": ("max_tokens", "n_tokens", "stop", "ignore_eos", "context_shift", "n_keep"),
    "Sampling": (
        *("temperature", "temperatures", "seed", *NUMBERS),
        *("dry_sequence_breakers", "logit_bias", "samplers"),
    ),
    "Constraints": (
        *("json_schema", "json_schema_file", "grammar", "grammar_file", "regex", "regex_file"),
        *("choices",),
    ),
    "Devices and memory": (
        *("n_gpu_layers", "n_gpu_layers_draft", "override_tensor", "n_cpu_moe", "n_cpu_ffn"),
        *("override_tensor_draft", "n_cpu_moe_draft", "n_cpu_ffn_draft", "tensor_split"),
        *("main_gpu", "rpc", "ram", "prompt_cache", "prompt_cache_ro"),
        *("gpu_bandwidth", "ram_bandwidth", "n_threads", "n_threads_draft", "n_ctx", "n_ctx_draft"),
        *("n_batch", "flash_attention", "type_k", "type_v", "mmap", "cache_ram", "ctx_checkpoints"),
        *("mlock", "repack", "op_offload", "override_kv", "rope_scaling", "rope_scale"),
        *("rope_freq_base", "rope_freq_scale", "yarn_orig_ctx"),
    ),
    "Server": ("host", "api_key", "api_key_file", "cors_origins", "n_slots", "slot_folder"),
    "Processes": ("n_workers", "address", "n_gpus"),
    "Limits": ("max_queue", "timeout", "n_tokens_max", "max_body", "grace", "n_retries"),
    "Measurement": (
        *("n_runs", "runs", "n_warm_up", "depth", "n_most", "alpha", "near_tie", "forgets"),
        *("against", "llama_bin", "compare"),
    ),
    "Output": (
        *("form", "json_path", "resume", "retry_failed", "plot_path", "record", "speed", "color"),
        *("as_json", "verbose"),
    ),
}
_SHORTER: Final = {
    "INTEGER RANGE": "N",
    "FLOAT RANGE": "X",
    "INTEGER": "N",
    "FLOAT": "X",
    "N|AUTO": "N|auto",
}
_FEW: Final = 12  # a command with so few options needs no sections


class SectionedCommand(click.Command):
    """A command whose --help has sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records: dict[str, list[tuple[str, str]]] = {}  # a flag may set another option's value
        for option in self.get_params(ctx):
            if isinstance(option, click.Argument):
                continue  # already in the usage line; some versions of click return an empty record
            if option.name and (record := option.get_help_record(ctx)) is not None:
                records.setdefault(option.name, []).append((_shortened(record[0]), record[1]))
        if len(records) <= _FEW:
            with formatter.section("Options"):
                formatter.write_dl([*chain(*records.values())])
            return
        for title, names in _SECTIONS.items():
            is_last = title == list(_SECTIONS)[-1]
            listed = [records.pop(name) for name in names if name in records]
            listed += records.values() if is_last else []
            if listed:
                with formatter.section(title):
                    formatter.write_dl([*chain(*listed)])


class SectionedGroup(click.Group, SectionedCommand):
    """A group whose --help has sections, and whose commands have them too."""

    command_class = SectionedCommand


def _shortened(usage: str) -> str:
    for long, short in _SHORTER.items():
        usage = usage.replace(long, short)
    return usage
