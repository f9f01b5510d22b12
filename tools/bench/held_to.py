"""What the benchmarks' figures are held to."""

from __future__ import annotations

from tools.bench.bench_convert import SUFFIX
from tools.bench.tables import Target

OURS = "mmreplay"
LOADER = "mmreplay_loader"
MAPPED = "torchrl_lazy_memmap"
KINDS = {
    "uniform_256_x_28_kb": "cold 256 rows of 28 KB",
    "runs_32_x_50_x_7_kb": "cold 32 runs of 50 rows of 7 KB",
}


def at_least(question: str, script: str, path: tuple[str, ...] | str, bound: float) -> Target:
    """A figure that is to be at least so much; the path by keys, or in one word."""
    return Target(question, script, _keys(path), bound)


def at_most(question: str, script: str, path: tuple[str, ...] | str, bound: float) -> Target:
    """A figure that is to be at most so much."""
    return Target(question, script, _keys(path), bound, is_minimum=False)


def _keys(path: tuple[str, ...] | str) -> tuple[str, ...]:
    return tuple(path.split()) if isinstance(path, str) else path


COLD = tuple(
    target
    for kind, words in KINDS.items()
    for target in (
        *(
            at_least(f"{words}, over {name}", "bench_cold", f"{kind} speedup {name}", 30)
            for name in (MAPPED, "cpprb_mmap", "np_memmap")
        ),
        at_most(
            f"{words}, time over that of the best 32 threads",
            "bench_cold",
            f"{kind} over_the_best_threads",
            1.2,
        ),
    )
)

BEYOND = tuple(
    target
    for script, words in (
        ("bench_beyond", "ring 4 times memory"),
        ("bench_beyond_8", "ring 8 times memory"),
        ("bench_beyond_small", "rows of 168 bytes, ring 4 times memory"),
    )
    for target in (
        *(
            each
            for way in (OURS, LOADER)
            for each in (
                at_least(
                    f"{words}, {way}, draws over {MAPPED}",
                    script,
                    f"draw_speedup_of_{way} {MAPPED}",
                    100,
                ),
                at_least(
                    f"{words}, {way}, draws over cpprb_mmap",
                    script,
                    f"draw_speedup_of_{way} cpprb_mmap",
                    100,
                ),
                at_most(
                    f"{words}, {way}, memory over the limit",
                    script,
                    f"memory {way} peak_over_limit",
                    1,
                ),
                at_most(f"{words}, {way}, MiB in swap", script, f"memory {way} swapped_mib", 0),
                at_most(
                    f"{words}, {way}, last turns over the first",
                    script,
                    f"memory {way} last_quarter_takes_times_the_first",
                    1.2,
                ),
            )
        ),
        at_least(f"{words}, adds over np.memmap's", script, f"add_speedup_of_{OURS} np_memmap", 1),
        at_least(
            f"{words}, adds while a loader draws, over np.memmap's",
            script,
            f"add_speedup_of_{LOADER} np_memmap",
            1,
        ),
    )
)

LIBRARY = {"npz": "np_savez", "pt": "torch_save", "safetensors": "save_file"}
FILES = (("vectors", tuple(SUFFIX)), ("pixels", tuple(n for n in SUFFIX if n != "csv")))
CONVERT = (
    *(
        at_least(
            f"{kind} to {name}, over {LIBRARY[name]}",
            "bench_convert",
            f"{kind} {name} export speedup {LIBRARY[name]}",
            bound,
        )
        for kind, _ in FILES
        for name, bound in (("npz", 1), ("pt", 0.5), ("safetensors", 0.5))
    ),
    *(
        at_least(
            f"{kind} from {name}, over {LIBRARY[name]}'s reader",
            "bench_convert",
            f"{kind} {name} read speedup {LIBRARY[name]}",
            0.5,
        )
        for kind, _ in FILES
        for name in ("pt", "safetensors")
    ),
    *(
        at_least(
            f"{kind}, {direction} of {name}, over a synced copy",
            "bench_convert",
            f"{kind} {name} {direction} speedup synced_copy",
            0.9,
        )
        for kind, _ in FILES
        for name in ("pt", "safetensors")
        for direction in ("export", "load")
    ),
    at_least("csv, written, over pandas", "bench_convert", "vectors csv export speedup pandas", 5),
    at_least(
        "csv, read exactly, over pandas", "bench_convert", "vectors csv read speedup pandas", 5
    ),
    *(
        at_most(
            f"{kind}, {direction} of {name}, MiB of its own",
            "bench_convert",
            f"{kind} {name} {direction} peak_anon_mib",
            200,
        )
        for kind, names in FILES
        for name in names
        for direction in ("export", "read", "load")
    ),
)

SHARDS = tuple(
    at_least(
        f"256 rows of {codec}, {words}, over tensorstore",
        "bench_zarr_peers",
        f"{kind} {codec} speedup_over *",
        bound,
    )
    for kind, words, codec, bound in (
        ("one_row_a_chunk", "one a chunk", "blosc-lz4", 1),
        ("one_row_a_chunk", "one a chunk", "zstd", 0.77),
        ("blocks", "many a chunk", "blosc-lz4", 0.77),
        ("blocks", "many a chunk", "zstd", 0.77),
    )
)

SEALED = (
    *(
        at_least(
            f"256 rows of {codec}, over {side}", "bench_zarr", f"{codec} speedup_over {side}", bound
        )
        for codec in ("blosc-lz4", "zstd")
        for side, bound in (("zarr-python", 50), ("mmreplay_memmap", 0.125))
    ),
    *(
        at_least(
            f"256 cold rows of {codec}, over cold raw files",
            "bench_zarr",
            f"{codec} cold speedup_over mmreplay_memmap",
            1,
        )
        for codec in ("blosc-lz4", "zstd")
    ),
    at_least(
        "a step of 8 environments into shards, over raw files",
        "bench_zarr",
        "add speedup_over mmreplay_memmap",
        0.5,
    ),
    at_least(
        "sealing, over 20,000 rows a second",
        "bench_zarr",
        "seal blosc-lz4 rows_per_s_over_20000",
        1,
    ),
    at_least(
        "sealing, over zarr-python", "bench_zarr", "seal blosc-lz4 speedup_over zarr-python", 15
    ),
)

TRANSFORMS = (
    *(
        at_least(
            f"3 steps folded, 256, over {name}",
            "bench_transforms",
            f"n_step speedup_of_mmreplay {name}",
            bound,
        )
        for name, bound in (("stable_baselines3", 4), ("cpprb", 3), ("tianshou", 3), ("torchrl", 3))
    ),
    at_most(
        "4 frames stacked, 256, time over that of a bare take",
        "bench_transforms",
        "stacked_frames over_the_bare_take",
        1.3,
    ),
    *(
        at_least(
            f"4 frames and the next 4 stacked, 256, over {name}",
            "bench_transforms",
            f"stacked_frames with_next_ones speedup_of_mmreplay {name}",
            3,
        )
        for name in ("cpprb", "tianshou")
    ),
    at_least(
        "prioritized, folded and stacked, loader, over the fastest",
        "bench_transforms",
        "prioritized_n_step_stacked speedup_of_mmreplay fastest",
        3,
    ),
    at_least(
        "goals of the future, 256, over Stable-Baselines3",
        "bench_transforms",
        "her_future speedup_of_mmreplay stable_baselines3",
        3,
    ),
    at_least(
        "uniform 256, contiguous, over cpprb",
        "bench_transforms",
        "contiguous speedup_of_mmreplay cpprb",
        3,
    ),
)

VIEW = (
    at_most("the page, KiB", "bench_view", "page_kib", 200),
    at_most("wheels of its extra, MiB", "bench_view", "wheels_mib", 2),
    at_most("first paint, s", "bench_view", "opening first_paint_s", 0.3),
    at_most("overview of a ring of 100 million rows, s", "bench_view", "opening overview_s", 1),
    at_most("curve of a million rows x 4, s", "bench_view", "curve curve_drawn_s", 0.1),
    at_least("frames of 84 x 84 a second", "bench_view", "frames_s 84x84 *", 45),
    at_least("frames of 480 x 640 x 3 a second", "bench_view", "frames_s 480x640x3 *", 25),
    at_most("from add until the page shows it, s", "bench_view", "live added_shown_longest_s", 1),
    at_most(
        "from kill -9 until the page shows it, s", "bench_view", "live writer_gone_longest_s", 1
    ),
    at_most(
        "memory of the server with that overview, MiB over 64 B an episode",
        "bench_view",
        "server over_64_b_an_episode_mib",
        150,
    ),
    at_least(
        "rate of a watched writer over its rate alone", "bench_view", "writer_share watched", 0.95
    ),
)

CURATE = (
    at_most(
        "one condition on a field, time over that of its moments",
        "bench_curate",
        "where field_over_moments",
        2,
    ),
    at_most("merge of 20 rings, over conversions", "bench_curate", "merge merged_over_single", 1.2),
    at_least(
        "LeRobot's recorder, time over that of an export",
        "bench_curate",
        "lerobot save_episode_over_export",
        2,
    ),
    at_least(
        "from set to set, encoding again over packets",
        "bench_curate",
        "lerobot encoded_again_over_copied",
        20,
    ),
    at_most("append at 1,000 episodes, over one at 10", "bench_curate", "append many_over_few", 2),
    at_least("`add` while rows are held", "bench_curate", "held free_over_held", 0.95),
)

IMAGES = (
    *(
        at_most(
            f"256 JPEG frames of {size}, {kind}, time over that of {name}",
            "bench_images",
            f"draw {size} {kind} time_over {name.lower()}",
            1.1,
        )
        for size in ("96x96", "480x640")
        for kind in ("camera", "rendered")
        for name in ("LMDB", "Lance")
    ),
    *(
        at_least(
            f"64 steps of two cameras as JPEG, over LeRobot's {kind}",
            "bench_images",
            f"lerobot speedup 90:420 {kind}",
            3,
        )
        for kind in ("videos", "images")
    ),
    at_most("`add` of a camera's files, over bytes", "bench_images", "add files_over_bytes", 1.1),
    at_most("arrays of 30 Hz, share of a core", "bench_images", "add share_of_a_30_hz_camera", 1),
    at_least("import, over decoding alone", "bench_images", "import speed_over_decoding", 0.8),
)

RAY = (
    at_least(
        "on Ray, add of 8 steps, over TorchRL",
        "bench_ray",
        "same_node add_8_steps speedup torchrl",
        50,
    ),
    at_least(
        "on Ray, owner of the priorities, sample(256) with its update, over TorchRL's uniform",
        "bench_ray",
        "same_node alone speedup torchrl",
        5,
    ),
    at_least(
        "on Ray, by the shard, 8 batches a call, over TorchRL's uniform",
        "bench_ray",
        "same_node shard speedup torchrl",
        5,
    ),
    at_least(
        "on Ray, owner of the priorities, over RLlib",
        "bench_ray",
        "same_node alone speedup rllib",
        10,
    ),
    at_least("on Ray, by the shard, over RLlib", "bench_ray", "same_node shard speedup rllib", 10),
    *(
        target
        for what, words, bare, times in (
            ("vectors", "vectors of two other nodes", 2.5, 2),
            ("batch_of_1_mib", "1 MiB of two other nodes", 1.3, 1.2),
            ("batch_of_7_mb", "7 MB of two other nodes", 1.3, 1.2),
        )
        for target in (
            at_most(
                f"{words}, time over that of a bare transfer",
                "bench_ray",
                f"other_nodes {what} time_over_bare",
                bare,
            ),
            at_least(
                f"{words}, over TorchRL", "bench_ray", f"other_nodes {what} speedup torchrl", times
            ),
        )
    ),
    *(
        at_least(
            f"two rings on Ray, rate over that of one{words}",
            "bench_ray",
            f"one_against_two rate_of_two_over_one{kind}",
            0.95,
        )
        for kind, words in (
            ("", ", rows of a number"),
            ("_vectors", ", vectors"),
            ("_pixels", ", rows of 28 KB"),
        )
    ),
    *(
        at_least(f"{words}, p", "bench_ray", f"one_against_two {which}_p", 0.001)
        for which, words in (
            ("rings-1_chi_squared", "one ring on Ray, steps drawn, chi-squared"),
            ("rings-2_chi_squared", "two rings on Ray, steps drawn, chi-squared"),
            ("kolmogorov_smirnov", "one and two rings on Ray, Kolmogorov-Smirnov"),
        )
    ),
    at_least(
        "pixels on Ray, ring 4 times memory, over TorchRL",
        "bench_ray",
        "beyond_memory speedup torchrl",
        50,
    ),
    at_least(
        "RLlib's interface, add of 8 steps, over RLlib",
        "bench_ray",
        "behind_rllib add_8_steps speedup rllib",
        3,
    ),
    at_least(
        "RLlib's interface, sample(256) with its update, over RLlib",
        "bench_ray",
        "behind_rllib sample_256_and_update speedup rllib",
        10,
    ),
    at_least("shuffled epoch, over Ray Data", "bench_ray", "epoch speedup ray_data", 5),
    at_most(
        "shuffled epoch, memory over that of Ray Data",
        "bench_ray",
        "epoch memory_of_ours_over_ray_data",
        0.25,
    ),
)

RAGGED = (
    at_most(
        "sequences of any length, disk over their bytes",
        "bench_ragged",
        "disk_over_values mmreplay",
        1.1,
    ),
    at_least("sequences, add 1, over LMDB", "bench_ragged", "add_1 speedup lmdb", 1),
    at_least("sequences, add 256, over LMDB", "bench_ragged", "add_256 speedup lmdb", 5),
    at_least("sequences, draw 256, over LMDB", "bench_ragged", "draw_256 speedup lmdb", 5),
    at_most(
        "sequences, draw 256, time over that of a bare gather",
        "bench_ragged",
        "draw_256 over_the_bare_gather",
        1.5,
    ),
    at_most(
        "sequences, draw 256 cold, time over that of pixels",
        "bench_ragged",
        "cold over_pixels tokens",
        1,
    ),
)

TARGETS: tuple[Target, ...] = (
    at_least("add 1, over cpprb", "bench_add", "speedup add_1_full_ring cpprb", 3),
    at_least(
        "add 1, over Stable-Baselines3",
        "bench_add",
        "speedup add_1_full_ring stable_baselines3",
        0.5,
    ),
    at_most(
        "add 1,024 in a first lap, time over that of a bare copy",
        "bench_add",
        "first_lap_over_bare_copy",
        1.5,
    ),
    at_least("add 1,024, over skrl", "bench_add", "speedup add_1024_full_ring skrl", 0.8),
    at_least("add 1,024, over the fastest", "bench_add", "speedup add_1024_full_ring *", 1),
    at_least(
        "uniform 256, over the fastest", "bench_sample", "sample_256 speedup_of_mmreplay fastest", 3
    ),
    at_least(
        "uniform 4,096, over the fastest",
        "bench_sample",
        "sample_4096 speedup_of_mmreplay fastest",
        3,
    ),
    at_least(
        "prioritized 256 with its update, over the fastest",
        "bench_prioritized",
        "turn_256 speedup_of_mmreplay fastest",
        3,
    ),
    at_least(
        "prioritized 4,096 with its update, over the fastest",
        "bench_prioritized",
        "turn_4096 speedup_of_mmreplay fastest",
        2.5,
    ),
    at_least("sequences, over TorchRL", "bench_sequences", "speedup torchrl", 4),
    at_least("sequences, over skrl", "bench_sequences", "speedup skrl", 1),
    *TRANSFORMS,
    at_least(
        "filling pixels, over TorchRL, of a turn", "bench_pixels", "fill_speedup turn_by_turn", 2
    ),
    at_least("filling pixels, over TorchRL, in all", "bench_pixels", "fill_speedup total", 2),
    at_most("warm pixels, time over that of a bare take", "bench_pixels", "warm_over_take", 1.3),
    *COLD,
    *BEYOND,
    *CONVERT,
    *RAGGED,
    *SHARDS,
    *RAY,
    *SEALED,
    at_least(
        "loader, pixels, over the bare gather",
        "bench_loader",
        "pixels_256 over_the_bare_gather loader",
        0.9,
    ),
    at_least(
        "loader, 256 vectors, batches a second",
        "bench_loader",
        "vectors_256 batches_a_second",
        20_000,
    ),
    at_least(
        "loader, 4,096 vectors, over the bare gather",
        "bench_loader",
        "vectors_4096 over_the_bare_gather loader",
        0.5,
    ),
    at_most(
        "share that a learner of 5 ms waits, vectors",
        "bench_loader",
        "learner_waits vectors_256 *",
        0.05,
    ),
    at_most(
        "share that a learner of 5 ms waits, pixels",
        "bench_loader",
        "learner_waits pixels_256 *",
        0.05,
    ),
    *VIEW,
    *CURATE,
    *IMAGES,
)
