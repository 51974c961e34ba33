"""An OpenAI-compatible server over a runtime; needs the extra `serve`."""
