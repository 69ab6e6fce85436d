"""Layer 6: this package inside other frameworks; each module needs the framework of its name."""
