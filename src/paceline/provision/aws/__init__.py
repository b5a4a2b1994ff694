"""Nodes on AWS: created as one CloudFormation stack, and deleted as one."""
