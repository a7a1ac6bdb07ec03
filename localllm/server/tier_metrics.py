"""What the workers count of KV in RAM and on disk, in Prometheus' text form.

A worker without a disk tier has no samples of one. The folder's bytes are those of all models together:
every worker tells the same folder, so they are not to be added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from localllm.server import histograms

# family, kind, what it tells, the worker's counter
_Families = tuple[tuple[str, histograms.Kind, str, str], ...]
_MOVED: Final[_Families] = (
    ("localllm_kv_cells_retained", "gauge", "Cells held for prefixes of ended requests alone.", "retained_cells"),
    ("localllm_kv_exported_blocks_total", "counter", "Blocks copied out of the KV cache.", "n_exported_blocks"),
    ("localllm_kv_export_seconds_total", "counter", "Time of the engine's thread in copying out.", "export_s"),
    ("localllm_kv_restored_blocks_total", "counter", "Blocks put back into the KV cache.", "n_restored_blocks"),
    ("localllm_kv_restore_seconds_total", "counter", "Time of the engine's thread in putting back.", "restore_s"),
    ("localllm_kv_refused_blocks_total", "counter", "Blocks that the engine would not take back.", "n_refused_blocks"),
)
_RAM: Final[_Families] = (
    ("localllm_kv_ram_bytes", "gauge", "KV kept in RAM.", "ram_bytes"),
    ("localllm_kv_ram_limit_bytes", "gauge", "The most KV that is kept in RAM.", "ram_limit_bytes"),
    ("localllm_kv_ram_blocks", "gauge", "Blocks of KV kept in RAM.", "n_ram_blocks"),
    ("localllm_kv_ram_evictions_total", "counter", "Blocks that left RAM for lack of room.", "n_ram_evictions"),
)
_DISK: Final[_Families] = (
    ("localllm_kv_disk_folder_bytes", "gauge", "KV in the folder on disk, of all models.", "disk_used_bytes"),
    ("localllm_kv_disk_folder_limit_bytes", "gauge", "The most KV in that folder.", "disk_limit_bytes"),
    ("localllm_kv_disk_written_blocks_total", "counter", "Blocks written to disk.", "disk_n_written"),
    ("localllm_kv_disk_written_bytes_total", "counter", "Bytes of KV written to disk.", "disk_written_bytes"),
    ("localllm_kv_disk_waiting_bytes", "gauge", "Bytes of KV that wait to be written.", "disk_waiting_bytes"),
    ("localllm_kv_disk_read_blocks_total", "counter", "Blocks read from disk.", "disk_n_read"),
    ("localllm_kv_disk_bad_files_total", "counter", "Files set aside as damaged or foreign.", "disk_n_bad"),
    ("localllm_kv_disk_evictions_total", "counter", "Files deleted for lack of room, or for age.", "disk_n_evicted"),
    (
        "localllm_kv_disk_dropped_blocks_total",
        "counter",
        "Blocks that were to be written, and were not.",
        "disk_n_dropped",
    ),
    (
        "localllm_kv_disk_written_today_bytes",
        "gauge",
        "Bytes of KV written today, by all processes.",
        "disk_spent_today_bytes",
    ),
    ("localllm_kv_disk_daily_limit_bytes", "gauge", "The most that is written in a day.", "disk_daily_bytes"),
)
_FAILED: Final = "localllm_kv_disk_failed"


def lines(told: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    """Yield what workers counted, given as the model's name and its counters."""
    for name, kind, text, counter in (*_MOVED, *_RAM, *_DISK):
        yield from histograms.head(name, kind, text)
        for model, stats in told:
            value = stats.get(counter)
            if isinstance(value, (int, float)):
                yield histograms.sample(name, {"model": model}, value)
    yield from histograms.head(_FAILED, "gauge", "1 where nothing is written to disk any more, after failures.")
    for model, stats in told:
        if "disk_failure" in stats:
            yield histograms.sample(_FAILED, {"model": model}, int(bool(stats["disk_failure"])))
