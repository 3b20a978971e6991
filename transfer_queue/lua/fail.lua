-- needs: run, full, server, episode, queue, group
-- ARGV: episode, fence, outcome. Returns 1 if the episode will be tried again, 0 if it is given up.
local episode, fence = ARGV[1], ARGV[2]
local task_id, m = split_episode(episode)
local before = call('HMGET', group_key(task_id), 'k' .. m, 's' .. m)
if before[1] == fence then return before[2] == 'x' and 0 or 1 end

local member = owned(episode, fence, now_ms())
if not member then return lease_lost(episode, fence) end
local attempts = call('HINCRBY', member.group, 'a' .. m, 1)
call('HSET', member.group, 'k' .. m, fence)
if attempts < run.max_attempts then
  hand_back(episode, member)
  if member.split == 'train' then count('retried', 1) end
  return 1
end
unhold(episode, member.split, member.worker)
if member.journal_bytes > 0 then
  -- The journal goes to the letter: it no longer holds anybody up, but it still takes room.
  call('RENAME', key('journal:' .. episode), key('letter_journal:' .. episode))
  call('HSET', key('letter:' .. episode), 'bytes', member.journal_bytes)
  call('HDEL', member.group, 'n' .. m)
  if member.split == 'train' then add_bytes(0, -member.journal_bytes) end
end
put_letter(episode, ARGV[3], attempts)
call('HSET', member.group, 's' .. m, 'x')
if member.split == 'train' then count('failed', 1) end
count_split(member.split, 'done', 1)
member_ended(member)
return 0
