"""The `headrace` command. Each command imports what it needs: `status` must not wait for torch and Ray."""

from __future__ import annotations

import json
import logging
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from deploy.errors import DeployError, NotRunning
from deploy.runs import RunDirectory
from headrace.command_line import START_FAILED_STATUS
from headrace.config import ConfigError, load
from headrace.host_process import log_to_stderr
from node.__main__ import command as node_command
from router.__main__ import command as router_command

if TYPE_CHECKING:
    from deploy.api import RouterApi

KEY_VARIABLE = "HEADRACE_API_KEY"

app = typer.Typer(
    help="Serve hybrid LLMs as a disaggregated cluster: prefill nodes, decode nodes, a router.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
console = Console(markup=False)  # names and addresses may hold brackets
Name = Annotated[str, typer.Argument(help="the cluster's name")]
NameOption = Annotated[str | None, typer.Option("--name", help="the same, as `headrace up` takes it")]


def main() -> None:
    """Entry point: an expected error is one message and status 1, or 2 if the settings are wrong, not a traceback."""
    try:
        app()
    except (DeployError, ConfigError) as error:
        Console(stderr=True).print(f"headrace: {error}", style="red", markup=False, highlight=False)
        sys.exit(START_FAILED_STATUS if isinstance(error, ConfigError) else 1)


def _print_release(wanted: bool) -> None:
    if wanted:
        console.print(f"headrace {version('headrace')}", highlight=False)
        raise typer.Exit


@app.callback()
def _all_commands(
    release: Annotated[
        bool, typer.Option("--version", callback=_print_release, is_eager=True, help="show the release")
    ] = False,
) -> None:
    pass


@app.command()
def up(
    config: Annotated[Path | None, typer.Option("-c", "--config", help="cluster file (YAML)")] = None,
    model: Annotated[Path | None, typer.Option(help="checkpoint folder, instead of a cluster file")] = None,
    prefill: Annotated[int | None, typer.Option(help="number of prefill nodes")] = None,
    decode: Annotated[int | None, typer.Option(help="number of decode nodes")] = None,
    both: Annotated[int | None, typer.Option(help="number of nodes that prefill and decode")] = None,
    address: Annotated[str | None, typer.Option(help="of a running Ray cluster, or auto")] = None,
    port: Annotated[int | None, typer.Option(help="of the HTTP interface; 0: any free one")] = None,
    name: Annotated[str | None, typer.Option(help="the cluster's name")] = None,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="of the nodes; cuda: a GPU for each")] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="run in the background")] = False,
) -> None:
    """Start a cluster; Ctrl-C stops all of it.

    Its settings come from a cluster file, or from --model and the other flags, which override the file. Without a file
    and --address its nodes run on the GPUs of this host, if it has any, and else on its CPU.
    """
    from deploy.config import Overrides, cluster_from_options
    from deploy.host_gpus import gpus_of_this_host

    overrides = Overrides(model, prefill, decode, both, address, port, name, device)
    if config is None and address is None and device is None:
        overrides = overrides.for_host(gpus_of_this_host())
        where = "this host's GPUs" if overrides.device == "cuda" else "the CPU: nvidia-smi lists no GPU here"
        console.print(f"nodes run on {where} (--device cpu or cuda says otherwise)")
    cluster = cluster_from_options(config, overrides)
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
        console.print(f"{cluster.name} is ready at {', '.join(record.urls)}; `headrace down {cluster.name}` stops it")
        return
    runs = _runs()
    runs.require_free(cluster.name)  # before Ray is imported, which takes seconds
    os.environ["RAY_DEDUP_LOGS"] = "0"  # read when Ray is imported: two nodes may log the same, at different times
    from deploy.stop_request import StopRequest
    from deploy.supervisor import running_cluster, serve

    log_to_stderr()
    logging.getLogger("httpx").setLevel(logging.WARNING)  # or it logs a line for each poll of the router
    stop = StopRequest()
    with running_cluster(cluster, runs, stop, show_node_logs=True) as running:
        console.print(f"{cluster.name} is ready at {', '.join(running.urls)}; Ctrl-C stops it")
        serve(running, cluster, stop)
        console.print(f"{cluster.name} is stopping")


@app.command()
def settings() -> None:
    """Print all settings of a cluster file, with their defaults and what they mean."""
    from deploy.settings import settings_file

    print(settings_file(), end="")


@app.command()
def status(name: Name = "default", option: NameOption = None) -> None:
    """Show the nodes of a running cluster, and the links between them."""
    from deploy.api import first_to_answer
    from deploy.show import link_table, node_table

    name = option or name
    apis = _routers(name)
    urls = [each.url for each in apis]
    api, cluster = first_to_answer(apis)
    console.print(f"{name} at {', '.join(urls)}" + (f"; below, what {api.url} knows" if len(urls) > 1 else ""))
    console.print(node_table(cluster["nodes"]))
    console.print(link_table(cluster["links"]))


@app.command()
def role(
    node: Annotated[str, typer.Argument(help="the node's name")],
    role: Annotated[str, typer.Argument(help="prefill, decode or both")],
    name: Annotated[str, typer.Option(help="the cluster's name")] = "default",
    url: Annotated[str | None, typer.Option(help="a router elsewhere, instead of a cluster here")] = None,
) -> None:
    """Change what a running node is preferred for. New requests see it at once, running ones end where they are."""
    from deploy.api import first_to_answer

    apis = _routers(name, url)
    api = apis[0] if url else first_to_answer(apis)[0]
    api.switch_role(node, role)
    console.print(f"{node} has the role {role} now")


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(help="the id of an answer")],
    name: Annotated[str, typer.Option(help="the cluster's name")] = "default",
    url: Annotated[str | None, typer.Option(help="a router elsewhere, instead of a cluster here")] = None,
) -> None:
    """Show why a request went where it went: what the router saw of each node, chose, expected and got."""
    from deploy.api import first_to_explain
    from deploy.show import candidate_table, decision_lines

    for request in first_to_explain(_routers(name, url), request_id)["requests"]:
        for decision in request["decisions"]:
            console.print(f"{request['id']}: {decision_lines(decision)}")
            console.print(candidate_table(decision["candidates"]))


@app.command()
def drain(
    node: Annotated[str, typer.Argument(help="the node's name")],
    name: Annotated[str, typer.Option(help="the cluster's name")] = "default",
    url: Annotated[str | None, typer.Option(help="a router elsewhere, instead of a cluster here")] = None,
    timeout: Annotated[float, typer.Option(help="seconds after which requests begin again elsewhere")] = 60.0,
    keep: Annotated[bool, typer.Option("--keep", help="the node stays, without work")] = False,
) -> None:
    """Move a node's running requests to other nodes, with their caches, and stop it."""
    from deploy.control import STOP_MARGIN_S, order
    from deploy.show import drained_text

    if url or keep:
        for router in _routers(name, url):
            console.print(drained_text(router.drain(node, timeout_s=timeout, keep=keep)))
        return
    _runs().ready(name)
    wanted = {"order": "drain", "node": node, "timeout_s": timeout}
    console.print(drained_text(order(_runs().running(name).run_id, wanted, timeout + STOP_MARGIN_S)))


@app.command()
def scale(
    name: Name = "default",
    option: NameOption = None,
    prefill: Annotated[int | None, typer.Option(help="number of prefill nodes")] = None,
    decode: Annotated[int | None, typer.Option(help="number of decode nodes")] = None,
    both: Annotated[int | None, typer.Option(help="number of nodes that prefill and decode")] = None,
    timeout: Annotated[float, typer.Option(help="seconds after which a drained node's requests begin again")] = 60.0,
) -> None:
    """Give a running cluster other numbers of nodes. Those that are too many are drained, the newest first."""
    from deploy.control import START_MARGIN_S, order
    from deploy.operations import counts_of
    from deploy.show import drained_text

    name = option or name
    _runs().ready(name)
    wanted = {"order": "scale", "counts": counts_of(prefill, decode, both), "timeout_s": timeout}
    done = order(_runs().running(name).run_id, wanted, START_MARGIN_S + timeout)
    for report in done["drained"]:
        console.print(drained_text(report))
    added = f"; new: {', '.join(done['added'])}" if done["added"] else ""
    console.print(f"{name} has {', '.join(done['nodes'])}{added}")


@app.command()
def chat(
    name: Name = "default",
    option: NameOption = None,
    report: Annotated[bool, typer.Option("--report", help="show where each answer's tokens came from")] = False,
    max_tokens: Annotated[int, typer.Option(help="longest answer")] = 256,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token")] = 0.0,
    url: Annotated[str | None, typer.Option(help="a router elsewhere, instead of a cluster here")] = None,
) -> None:
    """Talk to a running cluster."""
    from deploy.api import first_to_answer
    from deploy.chat import converse

    apis = _routers(option or name, url)
    api = apis[0] if url else first_to_answer(apis)[0]
    converse(api, console, max_tokens=max_tokens, temperature=temperature, report=report)


@app.command()
def key(
    name: Annotated[str, typer.Argument(help="who gets the key; part of logs and errors")],
    tenant: Annotated[str, typer.Option(help="keys of one tenant share cached prefixes")] = "",
    access: Annotated[str, typer.Option(help="generate, view or operate")] = "generate",
    priority: Annotated[int, typer.Option(help="of its requests; lower numbers go first")] = 0,
    tokens_per_minute: Annotated[int | None, typer.Option(help="computed prompt tokens and answer tokens")] = None,
) -> None:
    """Make an API key: the key on standard error, its line for `api_keys` on standard output."""
    from router.keys import KeyFile, hash_of, new_key

    made = new_key()
    given = {"hash": hash_of(made), "tenant": tenant, "access": access, "priority": priority}
    line = {field: value for field, value in given.items() if value not in ("", "generate", 0)}
    if tokens_per_minute is not None:
        line["tokens_per_minute"] = tokens_per_minute
    load(KeyFile, {"api_keys": {name: line}}, "key")
    print(f"{made}  (shown once: keep it, the router has its hash alone)", file=sys.stderr)
    shown = ", ".join(f"{field}: {json.dumps(value)}" for field, value in line.items())
    print(f"  {json.dumps(name)}: {{{shown}}}")


@app.command()
def down(
    name: Name = "default",
    option: NameOption = None,
) -> None:
    """Stop a running cluster; no error when none runs."""
    from deploy.daemon import stop_run

    name = option or name
    try:
        stop_run(name, _runs())
    except NotRunning as nothing:
        console.print(str(nothing))
    else:
        console.print(f"{name} is stopped")


@app.command()
def demo() -> None:
    """Try a small cluster: start it, ask two questions, show the reports, stop it."""
    from deploy.demo import run_demo

    run_demo(_runs(), console)


app.command("node")(node_command)
app.command("router")(router_command)


def _routers(name: str, url: str | None = None) -> list[RouterApi]:
    """Clients of a running cluster's routers, with the key of its run; of one elsewhere, with $HEADRACE_API_KEY."""
    from deploy.api import RouterApi

    if url:
        return [RouterApi(url, os.environ.get(KEY_VARIABLE, ""))]
    record = _runs().ready(name)
    return [RouterApi(each, record.api_key) for each in record.urls]


def _runs() -> RunDirectory:
    return RunDirectory.of_user(os.environ)
