"""`python -m paceline.launch.hosts.guard`: a host's agent."""

from paceline.launch.ssh.agent import main

if __name__ == "__main__":
    main()
