"""``mmreplay view``: a page that shows buffers in a browser, also while they grow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mmreplay.cli import show
from mmreplay.cli.exits import FAILED, only_reading
from mmreplay.cli.options import parse_path, usage_error
from mmreplay.errors import SchemaError

MAX_PORT = 65535

Paths = Annotated[
    list[Path] | None,
    typer.Argument(
        parser=parse_path, metavar="PATH...", show_default=False, help="Folders of buffers."
    ),
]
Images = Annotated[
    list[str] | None,
    typer.Option(
        "--image",
        metavar="FIELD=AXES",
        show_default=False,
        help="Axes of an image field, of H, W, C and N (stacked frames), such as "
        "observation=CHW; FIELD=none shows numbers. Repeat it for more.",
    ),
]
SamplerText = Annotated[
    str,
    typer.Option(
        "--sampler",
        metavar="TEXT",
        show_default=False,
        help='What draws at first, such as "PrioritizedSampler(alpha=0.6)".',
    ),
]


def view(
    paths: Paths = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            min=0,
            max=MAX_PORT,
            metavar="N",
            show_default=False,
            help="Port of the page; 0 for any. The first free one from 8642 on by default.",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="NAME",
            help="Address to serve on; other machines reach it at 0.0.0.0.",
        ),
    ] = "127.0.0.1",
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open the browser.")] = False,
    image: Images = None,
    sampler: SamplerText = "",
    save: Annotated[
        Path | None,
        typer.Option(
            "--save",
            parser=parse_path,
            metavar="FOLDER",
            show_default=False,
            help="Write the page to a new folder that opens from disk, and end.",
        ),
    ] = None,
    select: Annotated[
        Path | None,
        typer.Option(
            "--select",
            parser=parse_path,
            metavar="FILE",
            show_default=False,
            help="With --save: which episodes, as the page writes them.",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="RUN",
            show_default=False,
            help="The rings on this node of a run on a Ray cluster.",
        ),
    ] = None,
    address: Annotated[
        str, typer.Option("--address", metavar="HOST:PORT", help="With --ray: the cluster.")
    ] = "auto",
) -> None:
    """Show buffers on a page in the browser; it only reads. Ctrl-C ends it."""
    paths = paths or []
    if ray is not None:
        paths = [*paths, *rings_here(ray, address)]
    elif not paths:
        raise usage_error("Missing argument 'PATH...': folders of buffers, or --ray")
    if select is not None and save is None:
        raise usage_error("--select needs --save. Pass --save FOLDER as well.")
    with only_reading():
        # The first second of a start goes into these imports.
        from mmreplay.page import launch

        page = launch.make_page(paths, read_images(image or []), sampler)
    if save is not None:
        from mmreplay.page.saved import save_page

        with show.waiting("saving") as progress:
            report = save_page(page, save, select, progress)
        page.close()
        show.print_line(
            f"{save / 'index.html'}: {show.count(report.episodes)} of "
            f"{show.plural(report.total, 'episode')}, {show.format_size(report.nbytes)}"
        )
        for note in report.notes:
            show.print_line(f"note: {note}")
        if report.missing:
            raise typer.Exit(FAILED)
        return
    with only_reading():
        server = launch.make_server(page, host, port)
    show.print_line(f"Open {server.url} in a browser; Ctrl-C ends the page.")
    if not no_open and not launch.open_browser(server.url):
        show.print_line("No browser was found on this machine.")
    server.run()


def read_images(texts: list[str]) -> dict[str, str]:
    """Read ``FIELD=AXES`` of the command line.

    Raises:
        UsageError: One is something else.
    """
    images = {}
    for text in texts:
        path, equals, axes = text.rpartition("=")
        if not path or not equals or not axes:
            raise usage_error(f"--image must be FIELD=AXES, such as observation=HWC, got {text!r}.")
        images[path] = axes
    return images


def rings_here(run: str, address: str) -> list[Path]:
    """Return the folders of a run's rings on this node, and print the others'.

    Raises:
        SchemaError: This node has none.
    """
    import mmreplay.ray
    from mmreplay.cli.ray import print_status
    from mmreplay.ray.cluster import connected, this_node, this_node_id

    with connected(address):
        status = mmreplay.ray.status(run)
        key, node_id = this_node().key, this_node_id()
    # A writer may have given its shard another key than that of the node.
    here = [shard for shard in status.shards if shard.node_id == node_id]
    others = tuple(shard for shard in status.shards if shard.node_id != node_id)
    paths = [Path(ring.path) for shard in here for ring in shard.rings]
    if not paths:
        nodes = ", ".join(shard.key for shard in others if shard.rings)
        raise SchemaError(
            f"the run {run!r} has no ring on this node ({key}). Run mmreplay view "
            f"--ray {run} on one that has: {nodes or 'none yet'}."
        )
    if others:
        show.print_line("On other nodes, where the same command shows them:")
        print_status(replace(status, shards=others))
    return paths
