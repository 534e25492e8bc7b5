// Load program for tickwheel over its gRPC API, with the stubs that protoc makes of proto/.
package main

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"tickwheel/peers/load"
	"tickwheel/peers/pb"
)

const (
	topic          = "bench"
	group          = "bench"
	credits        = 40_000
	deliveredMax   = 4_096 // messages in a batch of deliveries
	rowsMax        = 1_000
	rowsBatches    = 16 // batches of rows under way
	batchesASecond = 50 // of rows, at a given rate
	messageBytes   = 64 << 20
)

func main() {
	arguments, tally := load.Parse(), load.NewTally()
	if arguments.Case == "deliver" {
		consume(dial(arguments.Address), tally)
	}
	client := pb.NewSchedulerClient(dial(arguments.Address))
	load.Run(arguments, tally, func(pace *load.Pace, due load.Span) {
		maker := &maker{arguments.Bytes, due, tally}
		switch arguments.Mode {
		case "unary":
			unary(client, arguments.Window, maker, pace)
		case "stream":
			stream(client, arguments.Window, 1, maker, pace)
		case "rows":
			rows := int64(rowsMax)
			if arguments.Rate > 0 {
				rows = int64(max(1, min(rowsMax, arguments.Rate/batchesASecond)))
			}
			stream(client, rowsBatches, rows, maker, pace)
		default:
			load.Must(errors.New("MODE is unary, stream or rows, not " + arguments.Mode))
		}
	})
}

func dial(address string) *grpc.ClientConn {
	connection, err := grpc.NewClient(address,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(messageBytes), grpc.MaxCallSendMsgSize(messageBytes)))
	load.Must(err)
	return connection
}

type maker struct {
	bytes int
	due   load.Span
	tally *load.Tally
}

func (m *maker) next() (*pb.Message, int64) {
	payload, number, dueMs := m.tally.Next(m.bytes, m.due)
	return &pb.Message{Topic: topic, Payload: payload, When: &pb.Message_DueMs{DueMs: dueMs}}, number
}

// unary calls Schedule from so many callers of one connection at once; each waits for its answer.
func unary(client pb.SchedulerClient, callers int, maker *maker, pace *load.Pace) {
	var running sync.WaitGroup
	for range callers {
		running.Add(1)
		go func() {
			defer running.Done()
			for pace.Turn(1) {
				message, number := maker.next()
				if _, err := client.Schedule(context.Background(), &pb.ScheduleRequest{Message: message}); err != nil {
					maker.tally.Failed(1, err)
				} else {
					maker.tally.Accepted(number)
				}
			}
		}()
	}
	running.Wait()
}

// stream sends batches of so many messages over one ScheduleStream, with a window of batches under way.
func stream(client pb.SchedulerClient, window int, each int64, maker *maker, pace *load.Pace) {
	call, err := client.ScheduleStream(context.Background())
	load.Must(err)
	underWay, done := make(chan []int64, window), make(chan struct{})
	go func() {
		defer close(done)
		for {
			receipt, err := call.Recv()
			if errors.Is(err, io.EOF) {
				return
			}
			load.Must(err)
			numbers := <-underWay // receipts come in the order of the batches
			if len(receipt.Error) > 0 {
				maker.tally.Failed(int64(len(numbers)), string(receipt.Error))
				continue
			}
			for _, number := range numbers {
				maker.tally.Accepted(number)
			}
		}
	}()
	for pace.Turn(each) {
		rows, numbers := &pb.RowBatch{}, make([]int64, 0, each)
		for range each {
			message, number := maker.next()
			rows.Messages, numbers = append(rows.Messages, message), append(numbers, number)
		}
		underWay <- numbers
		load.Must(call.Send(&pb.ScheduleBatch{Content: &pb.ScheduleBatch_Rows{Rows: rows}}))
	}
	load.Must(call.CloseSend())
	<-done
}

// consume takes batches and settles each as a whole, in the background.
func consume(connection *grpc.ClientConn, tally *load.Tally) {
	call, err := pb.NewConsumerClient(connection).Consume(context.Background())
	load.Must(err)
	send := func(request *pb.ConsumeRequest) { load.Must(call.Send(request)) }
	send(&pb.ConsumeRequest{Content: &pb.ConsumeRequest_Open{Open: &pb.OpenConsumer{
		Group: group, Topics: []string{topic}, Credits: credits, BatchMessagesMax: deliveredMax,
	}}})
	opened := make(chan struct{})
	go func() {
		for sequence := uint64(1); ; {
			response, err := call.Recv()
			load.Must(err)
			switch content := response.Content.(type) {
			case *pb.ConsumeResponse_Opened:
				close(opened)
			case *pb.ConsumeResponse_Moved:
				load.Must(errors.New("the master moved"))
			case *pb.ConsumeResponse_Deliver:
				batch := content.Deliver
				tally.Delivered(payloads(batch), load.NowMs())
				send(&pb.ConsumeRequest{Content: &pb.ConsumeRequest_Settle{Settle: &pb.SettleBatch{
					Sequence: sequence, Group: batch.Group, Topic: batch.Topic, Outcome: pb.Outcome_ACK, Ids: batch.Ids,
					Attempts: batch.Attempts, Positions: batch.Positions, Epoch: &batch.Epoch,
				}}})
				sequence++
				send(&pb.ConsumeRequest{Content: &pb.ConsumeRequest_Credits{Credits: uint32(len(batch.Ids) / 8)}})
			}
		}
	}()
	<-opened
}

// payloads of a batch: each record is a meta and a payload.
func payloads(batch *pb.DeliverBatch) [][]byte {
	word := binary.LittleEndian.Uint32
	found := make([][]byte, 0, len(batch.Ids)/8)
	start := uint32(0)
	for place := 0; place < len(batch.Sizes); place += 4 {
		meta := uint32(0)
		if len(batch.MetaSizes) > 0 {
			meta = word(batch.MetaSizes[place:])
		}
		end := start + word(batch.Sizes[place:])
		found = append(found, batch.Records[start+meta:end])
		start = end
	}
	return found
}
