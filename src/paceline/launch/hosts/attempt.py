"""`python -m paceline.launch.hosts.attempt`: a host's part of an attempt."""

from paceline.launch.ssh.node_attempt import main

if __name__ == "__main__":
    main()
