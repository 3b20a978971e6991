-- Servers, other splits, dead letters and numbers.

-- script: heartbeat
-- needs: run, full, clock
-- ARGV: server id, packed info, time to live in ms. Servers that have been silent for longer are forgotten.
call('HSET', key('servers'), ARGV[1], ARGV[2])
call('ZADD', key('servers_until'), now_ms() + tonumber(ARGV[3]), ARGV[1])
for _, silent in ipairs(call('ZRANGEBYSCORE', key('servers_until'), '-inf', now_ms())) do
  call('HDEL', key('servers'), silent)
  call('ZREM', key('servers_until'), silent)
end

-- script: deregister
-- needs: run, full
-- ARGV: server id.
call('HDEL', key('servers'), ARGV[1])
call('ZREM', key('servers_until'), ARGV[1])

-- script: servers
-- needs: run, clock
-- flags: allow-oom
-- Returns for each live server its packed info and the ms that its entry has left. It only reads them: those that ask
-- may not write them. The clock is kept: where no other client calls, entries must still run out.
local now = now_ms()
local live = call('ZRANGEBYSCORE', key('servers_until'), '(' .. now, '+inf', 'WITHSCORES')
local rows = {}
for i = 1, #live, 2 do
  rows[#rows + 1] = call('HGET', key('servers'), live[i])
  rows[#rows + 1] = tonumber(live[i + 1]) - now
end
return rows

-- script: report_update
-- needs: run, full
-- ARGV: packed update, nonce, how many are kept.
if first_time(ARGV[2]) then
  call('RPUSH', key('updates'), ARGV[1])
  call('LTRIM', key('updates'), -tonumber(ARGV[3]), -1)
end

-- script: report_usage
-- needs: run, full, server, episode
-- ARGV: packed report, nonce.
if first_time(ARGV[2]) then book('usage', ARGV[1]) end

-- script: trim_ledger
-- needs: run, full
-- ARGV: number. Entries up to it are deleted.
call('ZREMRANGEBYSCORE', key('ledger'), '-inf', ARGV[1])

-- script: results
-- needs: run, server, episode
-- flags: no-writes
-- ARGV: split. Returns its finished episodes, oldest task first, and how many are still out.
local names, out = {}, 0
for _, task_id in ipairs(call('ZRANGE', key('split:' .. ARGV[1]), 0, -1)) do
  local v = call('HMGET', group_key(task_id), 's0', 'b0')
  if v[2] then names[#names + 1] = task_id .. '#0' end
  if v[1] == 'q' or v[1] == 'l' then out = out + 1 end
end
return {names, out}

-- script: drop_split
-- needs: run, full, server, episode, queue, group
-- ARGV: split. Everything of it is deleted.
for _, task_id in ipairs(call('ZRANGE', key('split:' .. ARGV[1]), 0, -1)) do
  forget_group(task_id)
  drop_letter(task_id .. '#0')
end
call('DEL', key('split:' .. ARGV[1]))
for _, state in ipairs({'queued', 'leased', 'done'}) do call('HDEL', key('splits'), ARGV[1] .. ' ' .. state) end

-- script: add_wait
-- needs: run, full
-- ARGV: role:cause, seconds, nonce.
if first_time(ARGV[3]) then call('HINCRBYFLOAT', key('waits'), ARGV[1], ARGV[2]) end

-- script: status
-- needs: run, server, episode, queue
-- flags: no-writes
-- Returns a packed map of everything that `Status` is made of; hashes as flat lists.
local now, quotas = now_ms(), quota_of()

-- How long the first group of some sorted sets has been in its state, in ms; -1 where there is none.
local function age(sets)
  local oldest = -1
  for _, set in ipairs(sets) do
    local first = call('ZRANGE', set, 0, 0)[1]
    if first then oldest = math.max(oldest, now - tonumber(call('HGET', group_key(first), 'at'))) end
  end
  return oldest
end

-- Groups that left fixed steps because their payloads are gone, of steps that are not published, and of those that are.
local function count_lost_groups()
  local shipped, trained = 0, 0
  if not call('HGET', key('counts'), 'payload_lost_groups') then return {shipped, trained} end
  for step = run.committed_step, run.next_step - 1 do
    local lost = tonumber(call('HGET', STEPS, 'lost:' .. step) or 0)
    if step < run.version then trained = trained + lost else shipped = shipped + lost end
  end
  return {shipped, trained}
end

return cmsgpack.pack({
  lost = count_lost_groups(),
  run = {run.version, run.next_step, run.committed_step, run.groups_per_step, run.committing},
  counters = call('HGETALL', key('counters')),
  queued = count_queued(quotas),
  parked = count_parked(quotas),
  admitted = call('ZCARD', key('admitted')),
  ready = call('ZCARD', key('ready')),
  open = call('ZCARD', key('open:train')),
  ages = {queued = age(queue_keys(quotas, true)), admitted = age({key('admitted')}), ready = age({key('ready')})},
  counts = call('HGETALL', key('counts')),
  lengths = call('HGETALL', key('lengths')),
  waits = call('HGETALL', key('waits')),
  failures = call('HGETALL', key('failures')),
  workers = call('HGETALL', key('workers')),
  splits = call('HGETALL', key('splits')),
})

-- script: dead_letters
-- needs: run
-- flags: no-writes
-- ARGV: start, limit; or an episode. Returns rows {episode, outcome, attempts, journal}, oldest first.
local function row(episode)
  local v = call('HMGET', key('letter:' .. episode), 'outcome', 'attempts')
  return {episode, v[1], tonumber(v[2]), call('HVALS', key('letter_journal:' .. episode))}
end

if #ARGV == 1 then
  return call('ZSCORE', key('letters'), ARGV[1]) and {row(ARGV[1])} or {}
end
local rows, start = {}, tonumber(ARGV[1])
for i, episode in ipairs(call('ZRANGE', key('letters'), start, start + tonumber(ARGV[2]) - 1)) do
  rows[i] = row(episode)
end
return rows

-- script: requeue
-- needs: run, server, episode, queue, group
-- ARGV: episode, nonce. Its group is queued again as it was submitted.
local episode, nonce = ARGV[1], ARGV[2]
if not is_new(nonce) then return end
if not call('ZSCORE', key('letters'), episode) then
  return refuse('QUEUE', episode .. ': no such dead letter')
end
local task_id = split_episode(episode)
local group = group_key(task_id)
local v = fields_of(group)
if v.state ~= 'dead' and v.state ~= 'done' then
  return refuse('QUEUE', episode .. ': its group continued without it; there is nothing to queue again')
end
local task = call('GET', key('task:' .. task_id))
for m = 0, tonumber(v.size) - 1 do drop_letter(task_id .. '#' .. m) end
forget_group(task_id)
call('SET', key('task:' .. task_id), task)
call('HSET', group, 'seq', v.seq, 'split', v.split, 'source', v.source, 'priority', v.priority, 'min_version',
  v.min_version, 'size', v.size, 'cost', v.cost, 'members_cost', v.members_cost, 'at', now_ms())
add_bytes(tonumber(v.cost) + (v.split == 'train' and 0 or tonumber(v.members_cost)), 0)
if v.split == 'train' then
  call('HSET', group, 'state', 'queued')
  call('ZADD', queue_key(v.source, quota_of()), queue_score(tonumber(v.priority), tonumber(v.seq)), task_id)
  count('queued_episodes', tonumber(v.size))
  count('dead_groups', -1)
else
  call('HSET', group, 'state', 'split', 'floor', v.min_version, 's0', 'q')
  count_split(v.split, 'done', -1)
  open_episode(episode, v.split, tonumber(v.min_version), tonumber(v.seq))
end
first_time(nonce)
