-- needs: run, full, server, episode, queue, group
-- ARGV: lane. Everything of it is deleted.
for _, task_id in ipairs(call('ZRANGE', key('lane:' .. ARGV[1]), 0, -1)) do
  forget_group(task_id)
  drop_letter(task_id .. '#0')
end
call('DEL', key('lane:' .. ARGV[1]))
for _, state in ipairs({'queued', 'leased', 'done'}) do call('HDEL', key('lanes'), ARGV[1] .. ' ' .. state) end
return 1
