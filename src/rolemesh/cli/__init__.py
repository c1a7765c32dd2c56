"""The command line. `main` is the entry point; heavy imports happen inside commands, so that help and plans are instant."""
