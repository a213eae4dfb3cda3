"""Records of jobs whose work is done elsewhere: those who watch them write only what the work itself has not said."""

from __future__ import annotations

import json
from typing import Any

from semantide.shared.contracts import JobRecord, JobSpec
from semantide.shared.jobs import ENDED_JOBS, JOBS_INDEX, METRICS_SECONDS, Jobs, now_ms, open_jobs_key

# Redis: what follows is done to a job that has not ended.
_IF_OPEN = """
local state = redis.call('hget', KEYS[1], 'state')
if not state or state == '"succeeded"' or state == '"failed"' or state == '"cancelled"' then return 0 end
"""
_SET = "redis.call('hset', KEYS[1], unpack(ARGV)) return 1"
_END = """
redis.call('hset', KEYS[1], unpack(ARGV, 4))
redis.call('srem', KEYS[2], ARGV[1])
redis.call('expire', KEYS[3], ARGV[2])
redis.call('hincrby', KEYS[4], ARGV[3], 1)
return 1
"""
# Redis: make a record that nobody has made, among the open ones of its room.
_ADOPT = """
if redis.call('exists', KEYS[1]) == 1 then return 0 end
redis.call('hset', KEYS[1], unpack(ARGV, 3))
redis.call('zadd', KEYS[2], ARGV[2], ARGV[1])
redis.call('sadd', KEYS[3], ARGV[1])
return 1
"""


class FollowedJobs(Jobs):
    """Jobs that pods of a cluster work on."""

    def write_open(self, job_id: str, **fields: Any) -> bool:
        """Set some fields unless the job has ended meanwhile; whether they were set."""
        values = [text for name, value in fields.items() for text in (name, json.dumps(value))]
        return bool(self._redis.eval(_IF_OPEN + _SET, 1, self.key(job_id), *values))

    def open_jobs(self, room: str) -> list[JobRecord]:
        """A room's jobs that have not ended, oldest first."""
        records = self.readable(raw.decode() for raw in self._redis.smembers(open_jobs_key(room)))
        return sorted(records, key=lambda record: (record.created, record.id))

    def any_open(self, room: str) -> bool:
        """Whether a job of the room has not ended."""
        return bool(self._redis.exists(open_jobs_key(room)))

    def adopt(self, job_id: str, spec: JobSpec) -> JobRecord:
        """The record of a job that was begun as an NPUJob of this name, and by no request of ours."""
        record = JobRecord(id=job_id, spec=spec, created=now_ms(), state="running", npujob=job_id)
        values = [text for name, value in record.model_dump(mode="json").items() for text in (name, json.dumps(value))]
        keys = [self.key(job_id), JOBS_INDEX, open_jobs_key(spec.room)]
        self._redis.eval(_ADOPT, len(keys), *keys, job_id, record.created, *values)
        return self.get(job_id)

    def end_open(self, record: JobRecord, state: str, error: str) -> bool:
        """Record how a job ended for others who watch it, unless it has recorded an end itself; whether that was so."""
        fields = {"state": state, "error": error, "finished": now_ms()}
        values = [text for name, value in fields.items() for text in (name, json.dumps(value))]
        keys = [self.key(record.id), open_jobs_key(record.spec.room), self.metrics_key(record.id), ENDED_JOBS]
        return bool(self._redis.eval(_IF_OPEN + _END, len(keys), *keys, record.id, METRICS_SECONDS, f"{record.spec.room}/{state}", *values))

    def forget_step_seconds(self, job_id: str) -> None:
        """Other ranks begin."""
        self._redis.delete(self.ranks_key(job_id))
