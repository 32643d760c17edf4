"""The `headrace` command. Each command imports what it needs: `status` must not wait for torch and Ray."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.errors import DeployError, NotRunning
from deploy.runs import RunDirectory

app = typer.Typer(
    help="Serve hybrid LLMs as a disaggregated cluster: prefill nodes, decode nodes, a router.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(markup=False)  # names and addresses may have brackets
Name = Annotated[str, typer.Argument(help="the cluster's name")]
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def main() -> None:
    """Entry point: an error of ours is one message and status 1, not a traceback."""
    try:
        app()
    except DeployError as error:
        Console(stderr=True).print(f"headrace: {error}", style="red", markup=False, highlight=False)
        sys.exit(1)


@app.command()
def up(
    config: Annotated[Path | None, typer.Option("-c", "--config", help="cluster file (YAML)")] = None,
    model: Annotated[Path | None, typer.Option(help="checkpoint folder, instead of a cluster file")] = None,
    prefill: Annotated[int | None, typer.Option(help="number of prefill nodes")] = None,
    decode: Annotated[int | None, typer.Option(help="number of decode nodes")] = None,
    address: Annotated[str | None, typer.Option(help="of a running Ray cluster, or auto")] = None,
    port: Annotated[int | None, typer.Option(help="of the HTTP interface; 0: any free one")] = None,
    name: Annotated[str | None, typer.Option(help="the cluster's name")] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="run in the background")] = False,
) -> None:
    """Start a cluster, from a cluster file or from --model; Ctrl-C stops all of it."""
    from deploy.config import Overrides, cluster_from_options

    cluster = cluster_from_options(
        config, Overrides(model=model, prefill=prefill, decode=decode, address=address, port=port, name=name)
    )
    if detach:
        from deploy.daemon import start_detached

        arguments = [argument for argument in sys.argv[1:] if argument not in ("--detach", "-d")]
        record = start_detached(
            arguments,
            cluster.name,
            _runs(),
            start_timeout_s=cluster.ray.start_timeout_s + 10.0,
            stop_timeout_s=cluster.ray.stop_timeout_s,
        )
        console.print(f"{cluster.name} is ready at {record.url}; `headrace down {cluster.name}` stops it")
        return
    from deploy.stop_request import StopRequest
    from deploy.supervisor import running_cluster, serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # not a line for each look at the router
    stop = StopRequest()
    with running_cluster(cluster, _runs(), stop, show_node_logs=True) as running:
        console.print(f"{cluster.name} is ready at {running.url}; Ctrl-C stops it")
        serve(running, stop)
        console.print(f"{cluster.name} is stopping")


@app.command()
def status(name: Name = "default") -> None:
    """Show the nodes of a running cluster, and the links between them."""
    from deploy.api import RouterApi
    from deploy.show import link_table, node_table

    url = _runs().ready_url(name)
    cluster = RouterApi(url).cluster()
    console.print(f"{name} at {url}")
    console.print(node_table(cluster["nodes"]))
    console.print(link_table(cluster["links"]))


@app.command()
def chat(
    name: Name = "default",
    report: Annotated[bool, typer.Option("--report", help="show where each answer's tokens came from")] = False,
    max_tokens: Annotated[int, typer.Option(help="longest answer")] = 256,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token")] = 0.0,
    url: Annotated[str | None, typer.Option(help="a router elsewhere, instead of a cluster here")] = None,
) -> None:
    """Talk to a running cluster."""
    from deploy.api import RouterApi
    from deploy.chat import converse

    api = RouterApi(url or _runs().ready_url(name))
    converse(api, console, max_tokens=max_tokens, temperature=temperature, report=report)


@app.command()
def down(name: Name = "default") -> None:
    """Stop a running cluster; no error when none runs."""
    from deploy.daemon import stop_run

    try:
        stop_run(name, _runs())
    except NotRunning as nothing:
        console.print(str(nothing))
    else:
        console.print(f"{name} is stopped")


@app.command()
def demo() -> None:
    """Start a small cluster, ask it two questions of one chat, show the reports, stop it."""
    from deploy.demo import run_demo

    run_demo(_runs(), console)


def _pass_on(command: str, module: str, help_text: str) -> None:
    """A command whose arguments are the module's own."""

    @app.command(command, help=help_text, context_settings=PASS_ON)
    def run(context: typer.Context) -> None:
        raise typer.Exit(importlib.import_module(module).main(context.args))


_pass_on("prefill", "prefill_node.__main__", "Run one prefill node, without Ray.")
_pass_on("decode", "decode_node.__main__", "Run one decode node, without Ray.")
_pass_on("router", "router.__main__", "Run the router, without Ray.")
_pass_on("bench", "benchmarks.__main__", "Measure; `headrace bench --help` lists the benchmarks.")


def _runs() -> RunDirectory:
    return RunDirectory.of_user(os.environ)
