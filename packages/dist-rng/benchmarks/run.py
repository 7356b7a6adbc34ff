"""What `nox -s bench -- dist-rng` runs: the CPU fills."""

from cpu_fills import main

if __name__ == "__main__":
    main()
