"""One address in front of several engines that share a store folder. No torch here."""

from dayshift.engine.router.run import running_router, serve_router

__all__ = ["running_router", "serve_router"]
