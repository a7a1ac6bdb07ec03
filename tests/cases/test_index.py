"""Where each reported fault of other runtimes is tested: a case keeps at least one test that exists."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent

CASES: Mapping[str, tuple[str, ...]] = {
    "B01": (
        "runtime/test_detokenizer.py::test_every_split_of_a_text_gives_the_text_and_no_replacement",
        "runtime/test_service.py::test_a_character_cut_by_max_tokens_is_dropped_and_its_bytes_are_in_the_logprobs",
        "cases/test_command_line.py::test_b01_streamed_characters_are_whole_and_join_to_the_text",
        "cases/test_http.py::test_b01_an_answer_cut_inside_a_character_ends_before_it",
    ),
    "B03": (
        "runtime/test_stop.py::test_every_split_gives_what_the_whole_text_gives",
        "runtime/test_stop.py::test_wrong_stops_are_refused",
        "cases/test_command_line.py::test_b03_stops_cut_before_the_earliest_match_and_lose_nothing",
        "cases/test_http.py::test_b03_stops_cut_alike_whole_and_streamed",
    ),
    "B04": (
        "server/test_generation.py::test_an_error_before_the_first_token_is_a_plain_one",
        "server/test_openai_chat.py::test_what_cannot_be_honoured_is_a_plain_400_that_names_it",
        "server/test_real.py::test_a_prompt_beyond_the_context_is_a_plain_400_in_a_stream_too",
    ),
    "B06": (
        "models/test_chat_template.py::test_bos_is_never_doubled_nor_invented",
        "backends/llamacpp/test_tokenizer.py::test_bos_is_added_once_and_only_where_asked",
        "cases/test_library.py::test_b06_a_chat_has_one_start_mark_a_turn",
    ),
    "B08": (
        "models/test_chat_template.py::test_a_template_refuses_in_its_own_words",
        "cases/test_command_line.py::test_b08_a_refused_system_message_is_exit_2_in_the_templates_words",
        "cases/test_http.py::test_b08_what_a_template_refuses_is_a_400_in_its_words",
    ),
    "B09": (
        "models/test_chat_template.py::test_turns_are_neither_merged_nor_dropped",
        "models/test_chat_template.py::test_roles_that_do_not_alternate_name_the_message",
        "runtime/test_prepare.py::test_b09_a_turn_that_the_template_drops_is_refused_by_its_index",
    ),
    "B11": (
        "models/test_chat_template.py::test_a_failing_template_says_line_and_message",
        "models/test_chat_template.py::test_null_fields_are_absent",
        "cases/test_command_line.py::test_b11_a_template_that_fails_is_a_sentence_with_its_line",
        "cases/test_http.py::test_b11_a_template_that_fails_is_a_400_and_the_server_goes_on",
    ),
    "B12": (
        "runtime/test_prepare.py::test_a_prompt_is_never_cut",
        "cli/test_real_run.py::test_prompt_beyond_the_context_is_exit_5_with_both_numbers",
        "cases/test_command_line.py::test_b12_a_prompt_beyond_the_context_is_refused_whole",
        "cases/test_http.py::test_b12_a_prompt_beyond_the_context_is_refused_with_its_numbers",
    ),
    "B14": (
        "cases/test_library.py::test_b14_an_answer_without_limit_ends_when_its_context_is_full",
        "cases/test_http.py::test_b14_an_answer_without_limit_fills_the_context_and_ends",
    ),
    "B15": (
        "runtime/test_service.py::test_strict_prefix_of_a_cached_prompt_runs_its_last_token_again",
        "cases/test_command_line.py::test_b15_an_exact_repeat_is_answered_and_computes_its_last_token",
        "cases/test_library.py::test_b15_three_equal_prompts_are_answered_alike",
        "cases/test_http.py::test_b15_repeats_of_a_prompt_are_answered_alike_and_as_if_cold",
        "cases/test_cached.py::test_b15_repeats_that_come_back_from_ram_are_answered_as_if_cold",
        "cases/test_cached.py::test_b15_repeats_that_come_back_from_disk_are_answered_as_if_cold",
    ),
    "B18": (  # the key of what is kept; adapters themselves come later
        "cases/test_cached.py::test_b18_other_adapters_scales_or_salts_have_no_key_in_common",
        "cases/test_cached.py::test_b18_a_block_of_one_adapter_is_never_offered_to_another",
    ),
    "B19": (
        "cli/test_show.py::test_quantised_kv_that_the_heads_do_not_divide_is_refused",
        "cases/test_command_line.py::test_b19_a_quantised_v_without_flash_attention_is_refused_with_both_ways_out",
        "cases/test_command_line.py::test_b19_a_quantised_k_alone_needs_no_flash_attention",
    ),
    "B20": ("backends/llamacpp/test_kv_quality.py::test_q8_0_keeps_the_perplexity_of_f16_and_q4_0_does_not",),
    "B21": (
        "cases/test_http.py::test_b21_equal_requests_at_once_have_one_answer_and_others_their_own",
        "cases/test_cached.py::test_b21_equal_requests_at_once_have_one_answer_wherever_their_prefix_comes_from",
    ),
    "B23": (
        "cases/test_library.py::test_b23_greedy_is_the_argmax_of_the_raw_logits",
        "cases/test_library.py::test_b23_no_penalty_comes_unasked",
    ),
    "B26": (
        "server/test_openai_chat.py::test_chat_logprobs_have_an_entry_a_token",
        "server/test_openai_chat.py::test_streamed_logprobs_are_those_of_the_whole",
        "server/test_openai_completions.py::test_completion_logprobs_have_the_older_shape",
        "server/test_logprobs.py::test_an_offset_is_where_its_token_begins_in_the_text_also_after_broken_characters",
        "server/test_logprobs.py::test_minus_infinity_is_a_number_that_json_can_tell",
        "server/test_real.py::test_logprobs_are_those_of_the_tokens",
    ),
    "B29": (
        "server/test_openai_chat.py::test_usage_is_streamed_only_when_asked_for",
        "server/test_openai_chat.py::test_usage_of_a_stream_equals_that_of_the_whole",
        "server/test_real.py::test_a_stream_is_the_whole_answer_with_equal_usage",
        "cases/test_http.py::test_b29_an_empty_answer_is_a_whole_one",
    ),
    "B30": ("server/test_openai_chat.py::test_empty_turns_are_turns",),
    "B32": (
        "server/test_openai_chat.py::test_history_with_tool_calls_and_null_content_is_taken",
        "server/test_openai_chat.py::test_empty_turns_are_turns",
        "server/test_real.py::test_tools_and_odd_histories_are_answered",
    ),
    "B33": (
        "server/test_body.py::test_what_is_no_clean_json_of_this_kind_is_refused",
        "server/test_body.py::test_odd_framing_is_answered_with_an_error_body",
        "server/test_body.py::test_other_methods_are_405_with_what_is_allowed",
        "server/test_openai_chat.py::test_what_cannot_be_honoured_is_a_plain_400_that_names_it",
        "server/test_openai_completions.py::test_prompts_that_are_none_are_refused",
    ),
    "B45": (
        "server/test_generation.py::test_a_client_that_goes_ends_the_work",
        "server/test_generation.py::test_many_cancels_at_any_moment_leave_nothing_and_change_nothing",
        "server/test_generation.py::test_work_stops_within_a_step_of_the_client_going",
        "server/test_real.py::test_many_at_once_and_some_that_leave",
    ),
    "B50": (
        "backends/llamacpp/test_model.py::test_nothing_is_left_after_twenty_openings",
        "cases/test_library.py::test_b50_closing_during_a_generation_ends_it_and_leaves_no_thread",
    ),
    "B51": (
        "models/sources/test_crash.py::test_a_puller_killed_at_random_points_is_resumed",
        "models/sources/test_crash.py::test_several_processes_pull_the_same_model_once",
        "models/sources/test_download.py::test_a_flipped_byte_never_becomes_a_model",
        "models/test_store.py::test_every_truncation_of_a_provenance_leaves_a_usable_model",
        "cli/test_rm.py::test_damaged_model_can_be_deleted",
    ),
    "B52": (
        "models/test_resolve.py::test_a_file_is_used_in_place_however_it_is_called",
        "backends/llamacpp/test_model.py::test_a_path_with_spaces_and_other_scripts_loads",
        "cases/test_library.py::test_b52_a_store_of_any_name_is_listed_without_home_or_temporary_folder",
    ),
    "B54": (
        "models/test_gguf.py::test_bad_file_is_refused_by_field_name",
        "models/test_gguf.py::test_file_cut_anywhere_is_refused",
        "models/test_gguf.py::test_refusing_allocates_no_more_than_the_file_holds",
    ),
    "B56": (
        "models/test_memory.py::test_refusal_names_need_available_and_what_fits",
        "models/test_memory.py::test_absurd_context_of_a_header_is_bounded_by_memory",
        "cases/test_library.py::test_b56_the_estimate_is_within_15_percent_of_the_peak",
    ),
    "B58": (
        "cli/test_main.py::test_interrupt_at_any_moment_of_the_start_leaves_no_traceback",
        "cli/test_real_run.py::test_signal_at_any_moment_ends_without_a_traceback",
        "cli/test_run.py::test_second_signal_leaves_and_is_never_mistaken_for_a_failure",
        "cli/test_pull.py::test_signal_keeps_what_arrived_and_the_next_pull_takes_it_up",
        "server/test_serving.py::test_a_signal_drains_and_every_stream_ends_properly",
        "server/test_serving.py::test_a_second_signal_ends_it_now",
        "server/test_serving.py::test_a_signal_at_any_moment_of_the_start_ends_it",
    ),
    "an answer depends on what was cached before": (
        "cases/test_cached.py::test_no_answer_depends_on_what_was_cached_before",
        "cases/test_cached.py::test_details_of_an_answer_do_not_depend_on_what_was_cached_before",
        "cases/test_cached.py::test_a_request_without_cache_uses_nothing_and_leaves_nothing",
        "cases/test_cached.py::test_control_one_wrong_cell_changes_the_answer",
        "runtime/kv/test_tiers_equivalence.py::test_restarted_equals_cold_and_computes_one_token",
        "proof/test_kv.py::test_all_cases_are_right_on_an_exact_engine_and_each_did_what_it_is_for",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_case_has_a_test(case: str) -> None:
    for place in CASES[case]:
        path, _, name = place.partition("::")
        source = (TESTS / path).read_text(encoding="utf-8")
        functions = [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
        assert name in functions, place
