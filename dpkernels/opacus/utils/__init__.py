"""What Opacus keeps under this name, which scripts import from here."""
