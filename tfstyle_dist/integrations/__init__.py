"""Layer 6: strategies inside other libraries; each sub-package needs its library."""
