"""What the service itself costs and promises, measured on `everbatch up`: real processes, fsync on, the echo engine."""
