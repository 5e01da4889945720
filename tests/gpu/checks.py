"""All checks, in the order for a first run on a new device."""

from __future__ import annotations

from tests.gpu import attention, environment, exactness, graphs, memory, operators, randomness, streams
from tests.gpu.check import Check

CHECKS = (
    Check("versions", environment.versions),
    Check("plain_window", exactness.plain_window),
    Check("virtual_batchnorm", exactness.virtual_batchnorm),
    Check("attention_backends", attention.attention_backends),
    Check("layers", attention.layers),
    Check("host_reads", streams.host_reads),
    Check("copies_and_kernels", streams.copies_and_kernels),
    Check("offloaded_rows", streams.offloaded_rows),
    Check("out_of_memory", memory.out_of_memory, 90),
    Check("out_of_memory_virtual", memory.out_of_memory_virtual),
    Check("found_sizes", memory.found_sizes, 90),
    Check("checkpointed_streams", randomness.checkpointed_streams),
    Check("same_masks", randomness.same_masks),
    Check("discarded_window", randomness.discarded_window),
    Check("scaled_half", graphs.scaled_half),
    Check("graphed_callables", graphs.graphed_callables),
    Check("every_precision", exactness.every_precision),
    Check("whole_batch", exactness.whole_batch),
    Check("cached", exactness.cached),
    Check("mixed_devices", exactness.mixed_devices),
    Check("many_devices", memory.many_devices),
    Check("leaks", memory.leaks),
    Check("operators", operators.table, 120),
    Check("expandable_segments", memory.expandable_segments, 120),
    Check("compiled", graphs.compiled, 120),
    Check("compiled_virtual", graphs.compiled_virtual, 120),
    Check("ordinary_tests", environment.ordinary_tests, 240),
)
