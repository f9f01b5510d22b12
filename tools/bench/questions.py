"""The questions that docs/benchmarks.md answers, and where their figures stand."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Ratios:
    """One line of a table of ratios: mmreplay against other libraries.

    Attributes:
        label: What was measured.
        ratios: Keys from the result's root to the ratios by library; above 1 mmreplay
            is faster.
        amounts: Keys to the times or rates by side, mmreplay's among them; none where
            only ratios were recorded.
        ours: The side of mmreplay among the amounts.
    """

    label: str
    ratios: str
    amounts: str = ""
    ours: str = "mmreplay"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a table of figures without a peer.

    Attributes:
        label: What was measured, with its unit.
        path: Keys from the result's root to one figure, or to several by name.
    """

    label: str
    path: str


@dataclass(frozen=True, slots=True)
class Question:
    """One section of the page.

    Attributes:
        title: The heading.
        script: The benchmark, as in benchmarks.json or recorded.json.
        unit: Of the amounts in the tables of ratios.
        setup: Markdown: what is compared, and how the sides differ.
        ratios: Lines with peers.
        figures: Lines without.
    """

    title: str
    script: str
    unit: str
    setup: str
    ratios: tuple[Ratios, ...] = field(default=())
    figures: tuple[Figure, ...] = field(default=())


VECTORS = """Observation f32[17], action f32[6], reward, next observation, two bools; a
million rows. Peers hold everything in RAM; mmreplay's rows are in files, and
an add is visible to other processes when it returns."""

ADD = Question(
    "Adding transitions",
    "bench_add",
    "median µs",
    f"""{VECTORS}

mmreplay gets arrays, a float and two bools, as an environment returns them.
Each peer gets the form that it takes fastest, made before the clock starts. A
block of 1,024 rows is one step of 1,024 environments for skrl and
Stable-Baselines3: skrl 2.1.1 moves its cursor once for each *field* of a
block of one environment, so that the fields of a row come apart (the check of
the rows found it).""",
    tuple(
        Ratios(label, f"speedup {key}", f"median_us {key}")
        for label, key in (
            ("1 row, full ring", "add_1_full_ring"),
            ("1 row, first lap", "add_1_fresh_ring"),
            ("1,024 rows, full ring", "add_1024_full_ring"),
            ("1,024 rows, first lap", "add_1024_first_lap"),
        )
    ),
)

SAMPLE = Question(
    "Drawing transitions at random",
    "bench_sample",
    "median µs",
    f"""{VECTORS}

*Derived* reads the next observation from the following row, over 10,000
episodes, half of them with a final row. *Contiguous* copies the fields of a
batch apart; without it they are views of one array of records.""",
    tuple(
        Ratios(
            f"{size:,} rows{words}",
            f"sample_{size} speedup_of_{side}",
            f"sample_{size} median_us",
            side,
        )
        for size in (256, 4096)
        for words, side in (
            ("", "mmreplay"),
            (", contiguous", "mmreplay_contiguous"),
            (", derived", "mmreplay_derived"),
            (", derived, contiguous", "mmreplay_derived_contiguous"),
        )
    ),
    (
        Figure("256 rows: the draw, and copying alone, µs", "floor_256_us"),
        Figure("4,096 rows: the draw, and copying alone, µs", "floor_4096_us"),
        Figure("a reader alone, µs", "live_reader_us alone"),
        Figure("a reader beside a writer, µs", "live_reader_us beside_a_writer"),
        Figure("steps/s of that writer", "live_reader_us writer_steps_per_s"),
    ),
)

PRIORITIZED = Question(
    "Prioritized draws with their updates",
    "bench_prioritized",
    "median µs",
    """The same transitions, alpha 0.6 and beta 0.4, stratified. A turn draws a batch
with its weights and gives its steps new priorities. mmreplay gathers from
mapped files and stores priorities in a file that outlives the process; peers
hold everything in RAM.

mmreplay gives numpy arrays, or torch tensors that share their memory
(*torch*). Each peer gives what it gives by itself: cpprb and tianshou numpy
arrays, TorchRL tensors, flashbax arrays of JAX, with its draw and update
compiled and waited for, and its state donated. tianshou holds the rows as
1,024 environments, since it takes one step of each in a call. The check is
that every drawn row is a row that was stored. *One add* is a turn with an add
of one row in between, which the next draw must find and give a priority.""",
    tuple(
        Ratios(
            f"{size:,} rows{words}",
            f"turn_{size} speedup_of_{side}",
            f"turn_{size} median_us",
            side,
        )
        for size in (256, 4096)
        for words, side in (("", "mmreplay"), (", torch", "mmreplay_torch"))
    ),
    (
        Figure("256 rows: with one add, by rank; µs", "also_256_us"),
        Figure("4,096 rows: with one add, by rank; µs", "also_4096_us"),
        Figure(
            "`PrioritizedSampler`: a draw of 256, by rows of the ring, µs",
            "many_rows PrioritizedSampler median_us",
        ),
        Figure(
            "`RankPrioritizedSampler`: the same, µs", "many_rows RankPrioritizedSampler median_us"
        ),
    ),
)

TREE = Question(
    "Sum trees",
    "bench_tree",
    "median µs",
    """mmreplay's tree is float64 with 16 children a node, in C; TorchRL's is
float32, in C++, and gets numpy arrays (with tensors a set of 256 takes it
half as long again).""",
    tuple(
        Ratios(
            f"{words} of {leaves} leaves", f"speedup {leaves} {key}", f"median_us {leaves} {key}"
        )
        for leaves in ("1,000,000", "100,000,000")
        for words, key in (
            ("find 256", "find_256"),
            ("find 4,096", "find_4096"),
            ("set 256", "set_256"),
            ("set 4,096", "set_4096"),
        )
    ),
    (
        Figure("bytes a leaf, by leaves", "bytes_per_leaf"),
        Figure("C over numpy", "speedup_over_twin"),
    ),
)

SEQUENCES = Question(
    "Sequences, 32 of 50 steps",
    "bench_sequences",
    "median µs",
    """A million rows in 10,000 episodes, as torch tensors. mmreplay draws complete
windows inside episodes, across their ends (*any*) and padded (*pad*), with
the next observation stored and *derived*. TorchRL's slices lie within
episodes too, and it may cache its index of them (`cache_values=True`), since
nothing is added. skrl's sequences are rows that follow each other in memory,
over the ends of episodes and over the write cursor. The check refuses a step
that does not follow the one before and, except from skrl and *any*, a
sequence that crosses an end.

The time of a draw without its data, by rows of a simulated buffer, must grow
at most with the logarithm of the number of episodes.""",
    (Ratios("32 x 50 steps", "speedup", "median_us"),),
    (
        Figure("other ways, median µs", "median_us"),
        Figure("draw alone, `any`, by rows, µs", "draw_us_by_rows any"),
        Figure("draw alone, `episode`, by rows, µs", "draw_us_by_rows episode"),
        Figure("draw alone, `pad`, by rows, µs", "draw_us_by_rows pad"),
    ),
)

TRANSFORMS = Question(
    "Transforms, 256 steps",
    "bench_transforms",
    "median µs",
    """Steps of 17 + 6 floats in episodes of 100 steps that terminate, as torch
tensors. Every side's batches are checked against the steps that they are made
of.

- *3 steps folded*: Stable-Baselines3 (`NStepReplayBuffer`), tianshou
  (`compute_nstep_return`, with a target of zeros) and TorchRL (`MultiStep`
  over slices of three) fold when they draw, as mmreplay does. cpprb folds
  when it adds: its draw is that of single steps, and n is fixed.
- *4 frames and the next 4*: frames of 84 x 84 bytes, 14 MB in all, as cpprb's
  `stack_compress` and tianshou's `stack_num` make them. cpprb copies as many
  bytes in C: no library that copies them can be three times as fast.
- *Prioritized, folded, stacked*: drawn by priority, folded, stacked and
  updated, mmreplay through a `ReplayLoader`. cpprb cannot fold over its
  compressed stacks, and gets complete ones (four times the memory), folded
  when they are added.
- *Goals of the future*: four goals of the future to one of the step's own.
  Both sides call the same function for the rewards.
- *Contiguous*: a plain draw, each field an array of its own.

A burst is 20 draws in a row, after which code and data are in the caches.
Beside other programs that compute, ratios of the wall clock favour the side
whose bursts are shorter than a time slice: run it on a quiet machine. [Design
notes](design-notes.md#measurements) give figures with cold caches.""",
    tuple(
        Ratios(label, f"{key} speedup_of_mmreplay", f"{key} median_us")
        for label, key in (
            ("3 steps folded", "n_step"),
            ("4 frames and the next 4 stacked", "stacked_frames with_next_ones"),
            ("prioritized, folded, stacked", "prioritized_n_step_stacked"),
            ("the same, of frames", "prioritized_n_step_stacked_frames"),
            ("goals of the future", "her_future"),
            ("contiguous", "contiguous"),
        )
    ),
    (
        Figure(
            "4 frames stacked: time over that of a bare `np.take` of the same frames",
            "stacked_frames over_the_bare_take",
        ),
        Figure("the same, µs", "stacked_frames frames_us"),
    ),
)

SHUFFLED = Question(
    "An epoch without replacement over a billion rows",
    "bench_shuffled",
    "",
    """A simulated index of eight environments with a million episodes, whose last
steps are not legal starts. The only target is that memory does not grow.
torch's RandomSampler, which writes the complete order down, is timed beside
it at 1e7 rows.""",
    figures=(
        Figure("first batch, over torch's RandomSampler", "first_batch_speedup"),
        *(Figure(f"{rows:,} rows", f"by_rows {rows}") for rows in (10**6, 10**7, 10**8, 10**9)),
    ),
)

PIXELS = Question(
    "Pixels, 50,000 rows of u8[84,84,4] on disk",
    "bench_pixels",
    "MB/s",
    """*Warm* means warm for both: the first touch of a page through a mapping is a
fault even when the page is cached. *Cold* means that the guest's page cache
was dropped (`resident` checks it); the host below may still cache. Filling
takes new pages from the host; [Design notes](design-notes.md#measurements)
say how that spreads.""",
    (Ratios("cold, 256 rows", "cold_speedup", "cold_mb_per_s"),),
    (
        Figure("filling, over TorchRL's LazyMemmapStorage", "fill_speedup"),
        Figure("filling, MB/s", "fill_mb_per_s"),
        Figure("warm, 256 rows, µs", "warm_us"),
        Figure("warm: time over that of a bare take", "warm_over_take"),
        Figure("cold: time over that of 32 threads of preadv", "cold_over_preadv"),
    ),
)

COLD = Question(
    "Batches of which nothing is in memory",
    "bench_cold",
    "MB/s",
    """256 random rows of 28 KB of 20,000, and 32 runs of 50 rows of 7 KB of 80,000,
from files whose pages were dropped (`resident` checks it). Files of a byte or
two a row stay in memory: mmreplay's flags, TorchRL's ends of episodes, from
which its SliceSampler draws runs, with a cached index. cpprb has no runs and
gets their rows by index, as numpy's memmap does; h5py (contiguous) and
zarr-python (a row a chunk, in shards of 1,024, uncompressed) get rows sorted,
and runs as slices. The 32 threads read a plain file into memory, one call for
each run or row, and draw nothing.

Thirty times the peers is within the disk's reach for single rows, and beyond
it for runs, where the kernel reads ahead for every side ([Design
notes](design-notes.md#measurements)).""",
    tuple(
        Ratios(label, f"{key} speedup", f"{key} mb_per_s")
        for label, key in (
            ("256 rows of 28 KB", "uniform_256_x_28_kb"),
            ("32 runs of 50 rows of 7 KB", "runs_32_x_50_x_7_kb"),
        )
    ),
    (
        Figure(
            "256 rows: the best 32 threads, over each side",
            "uniform_256_x_28_kb speedup_of_the_best_threads",
        ),
        Figure(
            "32 runs: the best 32 threads, over each side",
            "runs_32_x_50_x_7_kb speedup_of_the_best_threads",
        ),
    ),
)


def _beyond(title: str, script: str, setup: str) -> Question:
    return Question(
        title,
        script,
        "MB/s, or adds/s",
        setup,
        tuple(
            Ratios(f"{word}, {way}", f"{key}_speedup_of_{side}", amounts, side)
            for word, key, amounts in (
                ("draws", "draw", "draw_mb_per_s"),
                ("adds", "add", "adds_per_s"),
            )
            for way, side in (("`sample`", "mmreplay"), ("`ReplayLoader`", "mmreplay_loader"))
        ),
        tuple(
            Figure(f"memory of {words}", f"memory {side}")
            for words, side in (
                ("mmreplay", "mmreplay"),
                ("mmreplay with a `ReplayLoader`", "mmreplay_loader"),
                ("np.memmap", "np_memmap"),
                ("cpprb", "cpprb_mmap"),
                ("TorchRL", "torchrl_lazy_memmap"),
            )
        ),
    )


BEYOND = _beyond(
    "A ring four times larger than memory",
    "bench_beyond",
    """Each side is a process under a memory limit of its own (512 MiB, cgroup) with
a ring of four times that, which it goes on writing: 500 adds of one row a
second, 64 at a time and at most 256 between two batches, over the oldest. All
write at that pace (14 MB/s). Libraries are loaded, and have drawn once,
before the limit holds. Processes take turns of two seconds (a batch at
least), 24 of them; the first, in which data of the fill goes to the disk, is
not counted. The `ReplayLoader` runs in the process that writes. Where no
cgroup can be made, pages are dropped before each batch instead.""",
)
BEYOND_8 = _beyond(
    "A ring eight times larger than memory",
    "bench_beyond_8",
    "The same with a ring of eight times the limit.",
)
BEYOND_SMALL = _beyond(
    "Rows of 168 bytes, a ring four times larger than memory",
    "bench_beyond_small",
    """The same with 12.7 million rows of 168 bytes. A draw of 256 reads as many
pages of 4 KiB.""",
)

MEMORY = Question(
    "Memory of a process",
    "bench_memory",
    "",
    """A ring of 2 GiB under a cgroup of 512 MiB, filled and drawn from for 1.25
laps. *Own* is what the process holds of its own, with batches of 7 MB among
it. The rest up to the limit is page cache of the files, which the kernel
fills the limit with and takes back as it needs. Where no cgroup can be made,
the same is held against `RLIMIT_DATA`.""",
    figures=(
        Figure("own memory, MiB", "own_mib"),
        Figure("growth, MiB", "growth_mib"),
        Figure("over so many steps", "steps"),
    ),
)

LOADER = Question(
    "The loader",
    "bench_loader",
    "",
    """`ReplayLoader` beside a bare gather of the same rows, and the share of its
time that a learner of 5 ms an update waits for batches.""",
    figures=(
        Figure("256 vectors, batches/s", "vectors_256"),
        Figure("256 vectors, over the bare gather", "vectors_256 over_the_bare_gather"),
        Figure("4,096 vectors, batches/s", "vectors_4096"),
        Figure("4,096 vectors, over the bare gather", "vectors_4096 over_the_bare_gather"),
        Figure("256 pixels, batches/s", "pixels_256"),
        Figure("256 pixels, over the bare gather", "pixels_256 over_the_bare_gather"),
        Figure("share waited, vectors", "learner_waits vectors_256"),
        Figure("share waited, pixels", "learner_waits pixels_256"),
    ),
)

FORMATS = {
    "vectors": ("npz", "pt", "safetensors", "csv", "parquet"),
    "pixels": ("npz", "pt", "safetensors", "parquet"),
}
CONVERT = Question(
    "Conversions",
    "bench_convert",
    "MB/s",
    """10 million vector rows (0.98 GB) and 70,000 rows of pixels (1.98 GB), from a
buffer to a file (*export*), read block by block (*read*), and into a new
buffer (*load*). Peers write arrays that are in memory already, and read
complete files into it; a *synced copy* moves bytes within the kernel and goes
through the page cache, so that ratios to it say more of the host than of
either side. Every side finds no old target, is synced at its end, and runs in
a process of its own. The figures of memory are MiB of the process's own.""",
    tuple(
        Ratios(
            f"{kind}, {direction} {name}",
            f"{kind} {name} {direction} speedup",
            f"{kind} {name} {direction} mb_per_s",
        )
        for kind, names in FORMATS.items()
        for name in names
        for direction in ("export", "read", "load")
    ),
    tuple(
        Figure(f"{kind}, {direction} {name}: MiB", f"{kind} {name} {direction} peak_anon_mib")
        for kind, names in FORMATS.items()
        for name in names
        for direction in ("export", "read", "load")
    ),
)

BYTES = Question(
    "Bytes on disk",
    "bench_bytes",
    "",
    "Real Atari frames and MuJoCo steps of random policies, in each format.",
    figures=tuple(
        Figure(f"{words}, {what}", f"{kind} {key}")
        for words, kind in (("Atari", "atari"), ("MuJoCo", "mujoco"))
        for what, key in (("bytes", "bytes"), ("times smaller", "times_smaller"))
    ),
)

CODECS = ("blosc-lz4", "zstd", "none")
ZARR = Question(
    "Compressed shards",
    "bench_zarr",
    "median µs",
    """`engine="zarr"` beside mmreplay's own mapped files and zarr-python, on Atari
frames. Rows that are written until they are sealed take some 45 µs of a core
each: on the writer's thread 10 to 40 for new pages of the staging rows, on
the sealer's 12 for packing, 9 for copying them out, 2.5 for the shard and 2.5
for giving space back; its syncs wait for the disk for 11 more. zarr-python
takes 225 µs a row on a calm machine and syncs nothing.""",
    (
        *(
            Ratios(f"256 rows, {codec}", f"{codec} speedup_over", f"{codec} median_us")
            for codec in CODECS
        ),
        *(
            Ratios(
                f"256 cold rows, {codec}", f"{codec} cold speedup_over", f"{codec} cold median_us"
            )
            for codec in CODECS
        ),
        Ratios("a step of 8 environments", "add speedup_over", "add median_us"),
        *(Ratios(f"sealing, {codec}", f"seal {codec} speedup_over") for codec in CODECS),
    ),
    (
        *(Figure(f"{codec}: times smaller", f"{codec} times_smaller") for codec in CODECS),
        *(
            Figure(f"sealing, {codec}: over 20,000 rows/s", f"seal {codec} rows_per_s_over_20000")
            for codec in CODECS
        ),
    ),
)

ZARR_PEERS = Question(
    "Reading Zarr groups of others",
    "bench_zarr_peers",
    "median µs",
    "256 rows out of one group, beside tensorstore without and with its cache.",
    tuple(
        Ratios(f"{words}, {codec}", f"{key} {codec} speedup_over", f"{key} {codec} median_us")
        for words, key in (("one row a chunk", "one_row_a_chunk"), ("many rows a chunk", "blocks"))
        for codec in CODECS
    ),
)

ADAPTERS = Question(
    "Adapters",
    "bench_adapters",
    "median µs",
    """The interfaces of other libraries over a buffer, beside the originals. *Both*
is an add and a sample, as an agent asks that learns once a step. The
originals of velora, tmrl and pytorchrl need environments of their own
([peers.md](peers.md)), where the same script was run. They were timed at
real-time priority (`chrt -f 5`). One add of mmreplay is published in files
when it returns; those of sb3, skrl and pytorchrl store some numbers into
arrays.""",
    tuple(
        Ratios(
            f"{name}, {call}",
            f"adapters {name} {call} speedup",
            f"adapters {name} {call} median_us",
        )
        for name in ("sb3", "skrl", "velora", "tmrl", "pytorchrl")
        for call in ("add", "sample", "both")
    ),
)

ALF = Question(
    "The adapter of alf",
    "bench_alf",
    "median µs",
    """alf is on no package index: tensors in RAM stand for the least that its memory
must do.""",
    tuple(
        Ratios(f"{kind}, {call}", f"alf {kind}_{call} speedup", f"alf {kind}_{call} median_us")
        for kind in ("uniform", "prioritized")
        for call in ("add", "draw")
    ),
)

ADAPTERS_BEYOND = Question(
    "Adapters beyond memory",
    "bench_adapters_beyond",
    "",
    """A memory limit of 128 MiB, and four times as many rows. *signal 9* is a
process that the kernel killed for memory.""",
    figures=tuple(
        Figure(f"{name}, {side}", f"adapters_beyond {name} {side}")
        for name in ("alf", "sb3", "skrl", "pytorchrl", "tmrl", "velora")
        for side in ("mmreplay", "original")
    ),
)

DURABILITY = Question(
    "Durability",
    "bench_durability",
    "",
    """The share of its time that a writer with a pace to keep spends in calls, at
each level of
[durability](guarantees.md#levels-of-durability-and-what-they-cost), and the
share that checksums take of a writer that does nothing else, all of it within
commits.""",
    figures=(
        Figure("share in calls, %", "busy_percent"),
        Figure("times that without commits", "times_process"),
        Figure("checksums, %", "checksum_percent"),
    ),
)

LOOKING = Question(
    "Statistics of 10 million steps",
    "bench_looking",
    "median µs",
    """Mean, spread and range of each field, beside numpy, and the commands that
print them.""",
    (Ratios("moments", "speedup", "median_us"),),
    (Figure("commands, s", "command_s"), Figure("commands, s of processor time", "command_cpu_s")),
)

VIEW = Question(
    "The page of `mmreplay view`",
    "bench_view",
    "",
    """The server in a process of its own, over a sparse ring of 100 million rows and
a million episodes, a curve of a million rows of four components, frames of noise,
and a writer that adds 84 x 84 frames one at a time. Headless Chromium runs on the
same machine without a graphics card: the first paint, the overview (until the
episode returns are drawn), a curve (from a new zoom until it is drawn) and frames
are timed in the page. A watched writer shares its two cores with the server;
"browser" adds Chromium, which draws the page there too.""",
    figures=(
        Figure("page, KiB", "page_kib"),
        Figure("wheels of the extra `web`, MiB", "wheels_mib"),
        Figure("server alone: s, and MiB of its own memory", "server"),
        Figure("overview of the ring, server just started, s", "opening"),
        Figure("curve, s", "curve"),
        Figure("frames a second, 84 x 84", "frames_s 84x84"),
        Figure("frames a second, 480 x 640 x 3", "frames_s 480x640x3"),
        Figure("from `add` or `kill -9` until the page shows it, s", "live"),
        Figure("steps/s of the writer", "writer_steps_s"),
        Figure("rate of the writer over its rate alone", "writer_share"),
    ),
)

CURATE = Question(
    "Conditions, merges and LeRobot sets",
    "bench_curate",
    "",
    """A condition on 10 million steps, whose field is read once, beside
`mr.field_moments` of that field; one ring of 20, beside each converted alone; a set of
two cameras of 256 x 256, written from a ring and by LeRobot's recorder with the same
codec and options, and from set to set with its packets and encoded again; an append of
one episode to a set of 1,000 and of 10; and `add` while rows are held.""",
    figures=(
        Figure("condition: time over that of `field_moments`", "where field_over_moments"),
        Figure("on lengths: time over that of `field_moments`", "where length_over_moments"),
        Figure("merge: time over that of single conversions", "merge merged_over_single"),
        Figure("LeRobot's recorder: time over an export's", "lerobot save_episode_over_export"),
        Figure("encoding again: time over that of packets", "lerobot encoded_again_over_copied"),
        Figure("append at 1,000 episodes: time over that at 10", "append many_over_few"),
        Figure("`add`: time over that while rows are held", "held free_over_held"),
    ),
)

IMAGES = Question(
    "Image fields",
    "bench_images",
    "",
    """256 frames drawn and decoded of a ring of JPEG files, beside LMDB and Lance with the
same files, the same decoder and as many threads, and beside rings of arrays, on disk
(*raw*) and compressed (*zarr*): the time over theirs, and the space over that of arrays.
A random batch of 64 steps with two cameras of 480 x 640, over LeRobotDataset of the same
frames. `add` of a camera's files over the same bytes in a `bytes` field, and the share of
one core that arrays of 30 Hz take. An import that encodes each frame, over decoding alone
in one thread.""",
    figures=(
        *(
            Figure(f"256 of {size} {kind}: {what}", f"draw {size} {kind} {key}")
            for size in ("96x96", "480x640")
            for kind in ("camera", "rendered")
            for what, key in (("time over", "time_over"), ("bytes over arrays", "bytes_over_raw"))
        ),
        *(
            Figure(f"JPEG {quality}: speed over LeRobot's", f"lerobot speedup {quality}")
            for quality in ("90:420", "95:444")
        ),
        Figure("bytes of those sets", "lerobot nbytes"),
        Figure("`add` of files: time over that of bytes", "add files_over_bytes"),
        Figure("arrays of 30 Hz: share of a core", "add share_of_a_30_hz_camera"),
        Figure("import: speed over decoding alone", "import speed_over_decoding"),
    ),
)

RAGGED = Question(
    "Sequences of any length",
    "bench_ragged",
    "median µs",
    """Token sequences of 40 to 8,000 int32, log-normal, 660 on average; 49,152 of them,
and rings that are full. *Padded* is mmreplay with each row as long as the longest. LMDB
and SQLite hold a value a row, and store an add or a block in one transaction; LMDB's
draws read values where they lie and copy them once. What is on disk is made durable
once a second; between two of these, LMDB does not sync, by which a power cut may damage
its file. TorchRL (a list of tensors) and TransferQueue (its default store, processes of
a Ray cluster on this machine) hold RAM. All but *padded* give the items of a batch in
one array, with the length of each.

The bare write joins the rows of a block and writes them with one call, without lengths,
checksums or commits: nothing that stores a block with a write is sooner done. The bare
gather is a loop of memcpy in C over as many values of as many bytes, found beforehand.
Cold batches are of values that are not in memory, beside rows of uint8[2640] in a ring;
references, 16 bytes a row, stay in memory as flags do, or are read as well.""",
    tuple(
        Ratios(label, f"{key} speedup", f"{key} median_us")
        for label, key in (("add 1", "add_1"), ("add 256", "add_256"), ("draw 256", "draw_256"))
    ),
    (
        Figure("add 256: time over that of a bare write", "add_256 over_the_bare_write"),
        Figure("draw 256: time over that of a bare gather", "draw_256 over_the_bare_gather"),
        Figure("disk, over the bytes of the values", "disk_over_values"),
        Figure("draw 256 cold: time over that of pixels", "cold over_pixels"),
        Figure("draw 256 cold, µs", "cold median_us"),
    ),
)

LIMITS = Question(
    "What the machine gives",
    "bench_limits",
    "",
    """Copying memory, and the disk's best: a file read from end to end, and random
rows read by 32 threads. They are the lines in the plots. Small files are read
faster than that where the host below the virtual disk has them in memory.""",
    figures=(Figure("memory, MB/s", "memory_mb_per_s"), Figure("disk, MB/s", "disk_mb_per_s")),
)

RAY = Question(
    "Rings on Ray",
    "bench_ray",
    "median µs",
    """Steps of 8 environments, and batches of 256 steps of 48,000, drawn by priority
with their updates: by the owner of the priorities (`alone=True`), and by the shard, 8
batches a call. Beside them TorchRL's `RayReplayBuffer`, one actor and a blocking call
each, draws uniformly and updates nothing, and RLlib's prioritized buffer is a plain
object of the learner. Then batches from two other nodes of this machine, two calls
ahead, beside as many bytes returned by two actors and copied out of Ray's store; the
same steps in one ring and in two; and pixels of a ring four times larger than the
memory of all processes of a side, whose libraries do not count. A side that the kernel
ends for its memory has no ratio.

Through the interface that RLlib calls: RLlib's own prioritized buffer (in RAM) and a
ring (in files), steps of 8 episodes that run, and draws with their updates of 256 of
48,000 steps of vectors. An epoch is of a million transitions in batches of 256: from a
ring, and by Ray Data from parquet files that it wrote, with a local shuffle buffer of a
tenth of the rows. The memory is that of all processes of a side, Ray's object store
among it.""",
    (
        Ratios(
            "add of 8 steps", "same_node add_8_steps speedup", "same_node add_8_steps median_us"
        ),
        Ratios(
            "sample(256) with its update, owner of the priorities",
            "same_node alone speedup",
            "same_node alone median_us",
        ),
        Ratios(
            "sample(256) with its update, by the shard",
            "same_node shard speedup",
            "same_node shard median_us",
            "mmreplay_shard",
        ),
        Ratios(
            "256 vectors of two other nodes, 16 batches a call",
            "other_nodes vectors speedup",
            "other_nodes vectors median_us",
        ),
        Ratios(
            "256 rows of 4 KiB of two other nodes",
            "other_nodes batch_of_1_mib speedup",
            "other_nodes batch_of_1_mib median_us",
        ),
        Ratios(
            "256 rows of 28 KB of two other nodes",
            "other_nodes batch_of_7_mb speedup",
            "other_nodes batch_of_7_mb median_us",
        ),
        Ratios("256 rows of 28 KB, ring 4 times the memory", "beyond_memory speedup"),
        Ratios(
            "add of 8 steps, RLlib's interface",
            "behind_rllib add_8_steps speedup",
            "behind_rllib add_8_steps median_us",
        ),
        Ratios(
            "sample(256) with its update, RLlib's interface",
            "behind_rllib sample_256_and_update speedup",
            "behind_rllib sample_256_and_update median_us",
        ),
        Ratios("a shuffled epoch", "epoch speedup"),
    ),
    (
        Figure("256 rows of 28 KB, ring 4 times the memory, MB/s", "beyond_memory mb_per_s"),
        Figure("the same rows read by 32 threads, MB/s", "beyond_memory preadv_mb_per_s"),
        Figure("one ring and two: a batch, median µs", "one_against_two median_us"),
        Figure("the same, vectors", "one_against_two median_us_vectors"),
        Figure("the same, rows of 28 KB", "one_against_two median_us_pixels"),
        Figure("a shuffled epoch, s", "epoch seconds"),
        Figure("its memory, MiB", "epoch memory_mib"),
    ),
)

KILLS = Question(
    "Killed, without power, on a full disk",
    "torture_peers",
    "",
    """The same steps in a buffer, in a memory map beside a JSON file, and in
TorchRL's replay buffer (`LazyMemmapStorage`, repeated `dumps`): how many of
200 attacks leave exactly the state that was reported as stored.
[Evidence](evidence.md#other-libraries-under-the-same-attacks) says more.""",
    figures=(
        Figure("right after `kill -9`, of 200", "right_after_kill"),
        Figure("right after a power cut, of 200", "right_after_power_cut"),
        Figure("an error on a full disk, of 200", "errors_on_a_full_disk"),
        Figure("a death by SIGBUS on a full disk, of 200", "killed_by_a_full_disk"),
        Figure("enough space after all, of 200", "fit_on_the_disk"),
    ),
)

QUESTIONS = (
    KILLS,
    ADD,
    SAMPLE,
    PRIORITIZED,
    TREE,
    SEQUENCES,
    TRANSFORMS,
    SHUFFLED,
    PIXELS,
    COLD,
    RAGGED,
    IMAGES,
    CURATE,
    BEYOND,
    BEYOND_8,
    BEYOND_SMALL,
    MEMORY,
    LOADER,
    CONVERT,
    BYTES,
    ZARR,
    ZARR_PEERS,
    ADAPTERS,
    ALF,
    ADAPTERS_BEYOND,
    RAY,
    DURABILITY,
    LOOKING,
    VIEW,
    LIMITS,
)
