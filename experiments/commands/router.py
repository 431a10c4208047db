"""`dayshift router`: one address in front of several engines."""

from __future__ import annotations

from typing import Annotated

import typer

from dayshift.experiments.commands.serve import api_key_from


def router(
    engine: Annotated[
        list[str], typer.Option(help="Address of an engine, http://HOST:PORT; give it once for each.")
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than loopback need a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8100,
    api_key_env: Annotated[
        str | None,
        typer.Option(help="Environment variable with the key that clients must send; engines get it too."),
    ] = None,
) -> None:
    """Route calls to engines that share a store folder; sessions stay where they are, or move."""
    from dayshift.engine.router import serve_router
    from dayshift.engine.router.run import RouterOptions

    serve_router(
        engine,
        RouterOptions(host=host, port=port, api_key=api_key_from(api_key_env)),
        on_ready=lambda url: typer.echo(f"routing to {', '.join(engine)} on {url}", err=True),
    )
