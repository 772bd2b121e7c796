"""Failures of parts while clients ask: workers, engines, frontends, planes, links, hosts, disk and clock."""
