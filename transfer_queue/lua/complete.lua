-- needs: run, episode, group
-- ARGV: episode, fence, payload bytes, rewarded (0 or 1), lowest version ('' for none), highest version, outcome.
local episode, fence, bytes, rewarded = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1'
local lowest, highest = tonumber(ARGV[5]), tonumber(ARGV[6])
local task_id, m = split(episode)
local before = call('HMGET', group_key(task_id), 's' .. m, 'f' .. m)
if before[1] == 'd' and before[2] == fence then return 0 end

local member = owned(episode, fence, now_ms())
if not member then return lease_lost(episode, fence) end
if highest > run.version then
  return refuse('BADPAYLOAD', 'version_spans: version ' .. highest .. ' is newer than ' .. run.version)
end
unhold(episode, member.lane, member.worker)
call('DEL', key('journal:' .. episode))
call('HDEL', member.group, 'n' .. m)
add_bytes(member.lane, bytes - member.journal_bytes)
call('HSET', member.group, 's' .. m, 'd', 'b' .. m, bytes)
if rewarded then
  call('HSET', member.group, 'r' .. m, 1)
  call('HINCRBY', member.group, 'rewarded', 1)
  local known = tonumber(call('HGET', member.group, 'lowest'))
  if lowest and (not known or lowest < known) then call('HSET', member.group, 'lowest', lowest) end
else
  call('HSET', member.group, 'o' .. m, ARGV[7])
end
if member.lane == 'train' then count('completed', 1) end
count_lane(member.lane, 'done', 1)
member_ended(member)
return 1
