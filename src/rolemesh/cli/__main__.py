"""`python -m rolemesh.cli`."""

from rolemesh.cli.main import main

main()
